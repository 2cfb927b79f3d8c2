"""Agents that forge their rewards: what they leave behind never runs in, or stands for, what judges them."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from podman_image import podman_image

from raylight.errors import CommandError
from raylight.harbor.attempt import HarborAttempt
from raylight.harnesses.command import CommandAgent
from raylight.harnesses.reward_command import RewardCommand
from raylight.runner.outcome import Outcome
from raylight.sandboxes import file_bundle
from raylight.sandboxes.file_bundle import FileBundle
from raylight.sandboxes.process import ProcessSandbox
from raylight.sandboxes.registry import SandboxSpec
from raylight.sandboxes.sandbox import SandboxLimits
from raylight.traces.reward_spans import find_final_reward

from ..harbor.test_attempt import make
from ..sandboxes.test_bubblewrap import can_run
from .test_command import run

__all__ = ["podman_image"]
needs_bubblewrap = pytest.mark.skipif(not can_run(), reason="needs bubblewrap and user namespaces")
PASS = "import os; os._exit(0)"
CHECK = {"check.py": 'import json, sys\nsys.exit(json.load(open("answer.json")) != 42)\n'}
MODULES = '"$({python} -m site --user-site)"'
"""Folder of a user's modules, which Python imports before a program."""
ATTACKS = {
    "nothing": "true",
    "modules at home": f'for HOME in "$HOME" /workspace "$PWD"; do d={MODULES}; mkdir -p "$d"; '
    f'echo "{PASS}" > "$d/usercustomize.py"; done',
    "the relay": f'echo "{PASS}" > /run/raylight/relay.py || (rm -rf /run; mkdir -p /run/raylight; '
    f'echo "{PASS}" > /run/raylight/relay.py)',
    "preloading": "echo /tmp/forged.so > /etc/ld.so.preload && echo 42 > answer.json",
    "the shell": "rm /bin; mkdir /bin; printf '#!/usr/bin/sh\\nexit 0' > /bin/sh; chmod 755 /bin/sh",
    "the check as a folder": "mkdir -p check.py/full",
    "the check as a link": f'echo "{PASS}" > other.py; ln -s other.py check.py',
    "the archive as a link": "ln -s /dev/null /workspace/.raylight-files.tar",
    "a later process": f'(sleep 0.3; echo "{PASS}" > check.py; echo 42 > answer.json) > /dev/null 2>&1 &',
}


async def reward_of(
    attack: str, judge: RewardCommand, sandbox: str | SandboxSpec, answer: str = "41"
) -> float | None:
    """Return the reward of an agent whose answer is wrong, and which then attacks."""
    script = f"echo {answer} > answer.json; {attack.format(python='python3')}"
    agent = CommandAgent(["sh", "-c", f"{{ {script}\n}} 2> /dev/null; true"], reward=judge, sandbox=sandbox)
    outcome, spans = await run(agent)
    assert outcome == Outcome("succeeded"), outcome.failure
    return find_final_reward(spans)


def python_check(**options: Any) -> RewardCommand:
    return RewardCommand(["/bin/sh", "-c", "python3 check.py"], files=CHECK, **options)


@needs_bubblewrap
@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_agent_in_bubblewrap_cannot_forge_its_reward(attack: str) -> None:
    spec = SandboxSpec("bubblewrap", limits=SandboxLimits(network=False))
    assert await reward_of(ATTACKS[attack], python_check(), spec) == 0.0


@needs_bubblewrap
async def test_honest_work_is_judged_by_its_files_alone() -> None:
    kept = "mkdir -p a/b; echo x > a/b/c; ln -s b/c a/link; chmod 700 a/b/c; echo data > /tmp/elsewhere"
    check = "cat a/link && test -x a/b/c && test ! -e /tmp/elsewhere && python3 check.py"
    judge = RewardCommand(["sh", "-c", check], files=CHECK)
    assert await reward_of(kept, judge, "bubblewrap", "42") == 1.0
    home = RewardCommand(["sh", "-c", 'test -z "$(ls -A "$HOME")" && test "$PWD" = /workspace/work'])
    assert await reward_of("touch ~/x", home, "bubblewrap") == 1.0
    assert await reward_of("touch ~/x ../home/y", RewardCommand(["ls", "../home/y"]), "bubblewrap") == 0.0
    same = RewardCommand(["ls", "../home/y"], sandbox="agent")
    assert await reward_of("touch ~/y", same, "bubblewrap") == 1.0


@needs_bubblewrap
async def test_a_reward_that_the_agent_wrote_is_not_that_of_its_judge() -> None:
    judge = RewardCommand(["sh", "-c", "test -e reward.json || echo 0.25 > reward.json"], reads="reward.json")
    assert await reward_of("echo 1 > reward.json", judge, "bubblewrap") == 0.25
    assert await reward_of("mkdir reward.json", judge, "bubblewrap") == 0.25


@needs_bubblewrap
@pytest.mark.parametrize("reads", ["out/reward.json", "out/../reward.json", "out/deep/reward.json"])
async def test_a_link_of_the_agents_leads_to_no_reward(reads: str) -> None:
    made = "mkdir -p data/x/deep; echo 1 | tee data/reward.json data/x/reward.json data/x/deep/reward.json"
    path = reads.replace("out/../", "")
    command = f"mkdir -p out/deep && test ! -e {path} && echo 0.25 > {path}"
    judge = RewardCommand(["sh", "-c", command], reads=reads)
    assert await reward_of(f"{made}; ln -s data/x out", judge, "bubblewrap") == 0.25


@needs_bubblewrap
async def test_an_archive_does_not_grow_beyond_its_limit() -> None:
    sandbox = SandboxSpec("bubblewrap").create()
    try:
        await sandbox.start()
        await sandbox.exec(["truncate", "-s", "600M", "sparse"])
        with pytest.raises(CommandError, match=r'256 MiB; .* or let RewardCommand\(sandbox="agent"\) judge'):
            await file_bundle.pack(sandbox, sandbox.workspace)
        written = await sandbox.exec(["stat", "-c", "%s", file_bundle.ARCHIVE])
        assert int(written.stdout) <= file_bundle.MAX_ARCHIVE_BYTES
    finally:
        await sandbox.stop()


async def test_packing_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tar").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "tar").chmod(0o755)
    monkeypatch.setattr(file_bundle, "PACK_TIMEOUT_S", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox = ProcessSandbox(None, SandboxLimits())
    try:
        await sandbox.start()
        with pytest.raises(CommandError, match=r"took more than 0.2 s; put .* RewardCommand\(sandbox="):
            await file_bundle.pack(sandbox, sandbox.workspace)
    finally:
        await sandbox.stop()


@pytest.mark.slow("CI's step with sandboxes runs it each time")
@pytest.mark.parametrize(("place", "reward"), [("fresh", 0.0), ("agent", 1.0)])
async def test_an_agent_in_a_container_changes_programs_of_its_own_only(
    podman_image: str, place: Any, reward: float
) -> None:
    forge = "rm /bin/grep; printf '#!/bin/sh\\nexit 0' > /bin/grep; chmod 755 /bin/grep"
    judge = RewardCommand(["grep", "-q", "42", "answer.json"], sandbox=place)
    assert await reward_of(forge, judge, f"podman:{podman_image}") == reward


@pytest.mark.slow("CI's step with sandboxes runs it each time")
async def test_files_of_an_image_that_the_agent_removed_stay_removed(podman_image: str) -> None:
    agent = CommandAgent(
        ["sh", "-c", "rm wget; echo 1 > new"],
        cwd="/bin",
        sandbox=f"podman:{podman_image}",
        reward=RewardCommand(["sh", "-c", "test -e new && test ! -e wget"]),
    )
    outcome, spans = await run(agent)
    assert outcome == Outcome("succeeded"), outcome.failure
    assert find_final_reward(spans) == 1.0


# Harbor


@needs_bubblewrap
@pytest.mark.parametrize("attack", ["modules at home", "preloading", "the shell", "the relay"])
async def test_harbors_tests_in_the_agents_bubblewrap_run_the_systems_programs(
    tmp_path: Path, attack: str
) -> None:
    write = 'open("/logs/verifier/reward.txt", "w").write'
    tests = f'#!/bin/sh\npython3 -c \'{write}(str(int(open("/app/answer.txt").read() == "42")))\'\n'
    task = make(tmp_path / "task", tests=tests)
    trial, sandbox = HarborAttempt(task), SandboxSpec("bubblewrap").create()
    forged = f"import os; {write}('1'); os._exit(0)".replace('"', '\\"')
    script = ATTACKS[attack].format(python="python3").replace(PASS, forged).replace("exit 0", forged_shell())
    try:
        await sandbox.start()
        workdir = await trial.prepare(sandbox)
        await sandbox.exec(["sh", "-c", f"printf 41 > answer.txt; {script}"], cwd=workdir)
        assert await trial.judge(sandbox) == 0.0
    finally:
        await sandbox.stop()


def forged_shell() -> str:
    return "echo 1 > /logs/verifier/reward.txt"


async def test_artifacts_bring_nothing_else_into_the_tests(tmp_path: Path) -> None:
    """A `tar` of the agent's own writes an archive with files elsewhere."""
    toml = 'artifacts = ["/app/out"]\n[verifier]\nenvironment_mode = "separate"\n'
    task = make(tmp_path / "task", toml, tests="#!/bin/sh\ncat /app/out/kept > /logs/verifier/reward.txt\n")
    archive = tmp_path / "forged.tar"
    archive.write_bytes(forged_archive(("app/out/kept", b"0.25"), ("bin/sh", b"x"), ("app/other", b"x")))
    own = tmp_path / "own"
    own.mkdir()
    (own / "tar").write_text(f'#!/bin/sh\nexec cp {archive} "$4"\n')
    (own / "tar").chmod(0o755)
    places = [ProcessSandbox(None, SandboxLimits()) for _ in range(2)]
    try:
        for place in places:
            await place.start()
        trial = HarborAttempt(task)
        workdir = await trial.prepare(places[0])
        await places[0].exec(["mkdir", "-p", "out"], cwd=workdir)
        honest = places[0].exec

        async def forged(command: list[str], **options: Any) -> Any:
            return await honest(["env", f"PATH={own}:{os.defpath}", *command], **options)

        places[0].exec = forged  # type: ignore[method-assign, assignment]
        assert await trial.judge(*places) == 0.25
        for path, names in (("", "app logs tests"), ("app", "given.txt out"), ("app/out", "kept")):
            assert (await places[1].exec(["ls", "-m", path or "."])).stdout.strip() == names.replace(
                " ", ", "
            )
    finally:
        for place in places:
            await place.stop()


# archives


def forged_archive(*files: tuple[str, bytes], members: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            archive.addfile(member)
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def names_of(bundle: FileBundle) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(bundle._archive())) as archive:
        return {info.name: info for info in archive}


def test_an_archive_of_an_agent_stays_in_its_folder() -> None:
    members = (
        member("link", tarfile.SYMTYPE, linkname="/bin"),
        member("pipe", tarfile.FIFOTYPE),
        member("device", tarfile.CHRTYPE),
        member("renamed", tarfile.REGTYPE, pax_headers={"comment": "x", "uname": "root"}),
        member("second", tarfile.LNKTYPE, linkname="/bin/sh"),
        member("closed", tarfile.DIRTYPE, mode=0o4000),
    )
    files = [
        (name, b"x") for name in ("../up", "/bin/sh", "a/../../up", "link/sh", "link", "a/./b", "closed")
    ]
    bundle = FileBundle()
    bundle.add_folder("/work")
    bundle.add_archive(forged_archive(*files, members=members), "/work")
    found = names_of(bundle)
    assert sorted(found) == ["work", "work/a/b", "work/closed", "work/link", "work/renamed"]
    assert (found["work/closed"].mode, found["work/renamed"].pax_headers) == (0o700, {})
    bundle.add({"link/sh": "ours", "closed": "ours"}, "/work")
    assert names_of(bundle)["work/link/sh"].isreg()
    assert names_of(bundle)["work/closed"].isreg()


@pytest.mark.parametrize(
    "archive",
    [
        b"\xff" * 2048,
        forged_archive(("a", b"x" * 4096))[:2048],
        forged_archive(members=(member("a", tarfile.REGTYPE, pax_headers={"size": str(1 << 60)}),)),
        forged_archive(members=(member("a", tarfile.REGTYPE, pax_headers={"mtime": "inf"}),)),
    ],
    ids=["noise", "cut", "huge", "time"],
)
def test_a_damaged_archive_of_an_agent_is_its_failure(archive: bytes) -> None:
    with pytest.raises(CommandError, match=r"cannot be read|MiB"):
        FileBundle().add_archive(archive, "/work")


def test_an_archive_has_a_limited_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.sandboxes.file_bundle.MAX_MEMBERS", 3)
    with pytest.raises(CommandError, match="more than 3 files"):
        FileBundle().add_archive(forged_archive(*((str(name), b"") for name in range(4))), "/work")
