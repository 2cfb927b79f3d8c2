-- Tables of the store's file.
--
-- Columns that need a word: `queue` is the position in the queue; `not_before` is the time until which a
-- waiting rollout is held back; `lost` and `charged` of a rollout are InfrastructureLosses, and `charged`
-- marks an attempt that is one of them; `suspect` marks a rollout that may have crashed its runner; `silence`
-- is `unresponsive_seconds`, and `silent_at` the time at which it is over; `not_before`, `began`, `ended`,
-- `timeout_at`, `silent_at` and `deadline` are in seconds that the run has lived; `gone` marks a released
-- worker; `base` and `shared` are explained at SPAN and CALL; `tokens` and `late` are the numbers of tokens
-- that an attempt sampled before and after its rollout was decided; `updated` orders resources by their last
-- change, and `used` clients by their last message.

CREATE TABLE rollouts (
    position INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    mode TEXT,
    group_id TEXT,
    resources_id TEXT,
    start_time REAL NOT NULL,
    end_time REAL,
    n_attempts INTEGER NOT NULL DEFAULT 0,
    lost INTEGER NOT NULL DEFAULT 0,
    charged INTEGER NOT NULL DEFAULT 0,
    suspect INTEGER NOT NULL DEFAULT 0,
    queue INTEGER,
    not_before REAL,
    config TEXT NOT NULL,
    metadata BLOB NOT NULL,
    input BLOB NOT NULL
);
CREATE INDEX rollouts_queue ON rollouts(suspect, queue) WHERE queue IS NOT NULL AND not_before IS NULL;
CREATE INDEX rollouts_held_back ON rollouts(not_before) WHERE not_before IS NOT NULL;
CREATE INDEX rollouts_status ON rollouts(status, position);
CREATE INDEX rollouts_status_start ON rollouts(status, start_time);
CREATE INDEX rollouts_start ON rollouts(start_time);

CREATE TABLE attempts (
    attempt_id TEXT NOT NULL UNIQUE,
    rollout_id TEXT NOT NULL,
    sequence_id INTEGER NOT NULL,
    status TEXT NOT NULL,
    worker_id TEXT,
    start_time REAL NOT NULL,
    end_time REAL,
    last_heartbeat_time REAL,
    failure TEXT,
    metadata BLOB,
    request_id TEXT,
    next_span INTEGER NOT NULL DEFAULT 1,
    silence REAL,
    began REAL NOT NULL,
    ended REAL,
    timeout_at REAL,
    silent_at REAL,
    deadline REAL,
    charged INTEGER NOT NULL DEFAULT 0,
    UNIQUE (rollout_id, sequence_id)
);
CREATE INDEX attempts_deadline ON attempts(deadline) WHERE deadline IS NOT NULL;
CREATE INDEX attempts_worker ON attempts(worker_id, start_time) WHERE status IN ('preparing', 'running');
CREATE INDEX attempts_request ON attempts(request_id) WHERE request_id IS NOT NULL;

CREATE TABLE spans (
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    sequence_id INTEGER NOT NULL,
    trace_id TEXT NOT NULL,
    span_id TEXT NOT NULL,
    parent_id TEXT,
    name TEXT NOT NULL,
    start_time REAL,
    end_time REAL,
    reward REAL,
    base TEXT,
    body TEXT NOT NULL
);
CREATE UNIQUE INDEX spans_id ON spans(attempt_id, span_id);
CREATE INDEX spans_order ON spans(rollout_id, attempt_id, sequence_id);
CREATE INDEX spans_reward ON spans(attempt_id, sequence_id) WHERE reward IS NOT NULL;

CREATE TABLE calls (
    call_id TEXT NOT NULL,
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    start_time REAL,
    recorder TEXT NOT NULL,
    request TEXT NOT NULL,
    base TEXT,
    shared INTEGER,
    generation BLOB,
    UNIQUE (attempt_id, call_id)
);
CREATE INDEX calls_open ON calls(attempt_id) WHERE generation IS NULL;

CREATE TABLE sampled (
    rollout_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    late INTEGER NOT NULL,
    PRIMARY KEY (rollout_id, attempt_id)
) WITHOUT ROWID;

CREATE TABLE resources (
    position INTEGER PRIMARY KEY,
    resources_id TEXT NOT NULL UNIQUE,
    version INTEGER NOT NULL,
    create_time REAL NOT NULL,
    update_time REAL NOT NULL,
    updated INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX resources_updated ON resources(updated);

CREATE TABLE steps (
    lineage TEXT NOT NULL,
    step INTEGER NOT NULL,
    groups TEXT NOT NULL,
    PRIMARY KEY (lineage, step)
) WITHOUT ROWID;

CREATE TABLE workers (
    worker_id TEXT PRIMARY KEY,
    gone INTEGER NOT NULL DEFAULT 0,
    heartbeat_stats TEXT,
    last_heartbeat_time REAL,
    last_dequeue_time REAL,
    last_busy_time REAL,
    last_idle_time REAL
) WITHOUT ROWID;

CREATE TABLE clients (
    client_id TEXT PRIMARY KEY,
    number INTEGER NOT NULL,
    results BLOB NOT NULL,
    used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX clients_used ON clients(used);

CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
