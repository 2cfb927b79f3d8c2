"""kuberay-rayjob.yaml is a RayJob that KubeRay accepts, and starts Ray as raylight needs it.

The schema here states the types of the fields that the manifest uses, after KubeRay's API reference. Name the
published one, `crds/ray.io_rayjobs.yaml` of its Helm chart, in RAYLIGHT_KUBERAY_CRD to check all of it.
"""

import copy
import json
import os
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raylight.serving.deploy.ingress import SERVE_FLAGS
from raylight.trainer.spec.run_file import load_run_file

ROOT = Path(__file__).parents[2]
FILE = ROOT / "kuberay-rayjob.yaml"
CRD_VARIABLE = "RAYLIGHT_KUBERAY_CRD"
TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


CONTAINER = an_object(
    "name",
    "image",
    name=TEXT,
    image=TEXT,
    env=many(an_object("name", name=TEXT, value=TEXT)),
    ports=many(an_object("containerPort", name=TEXT, containerPort=NUMBER)),
    resources=an_object(requests=TEXTS, limits=TEXTS),
    volumeMounts=many(an_object("name", "mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = an_object(
    "name",
    name=TEXT,
    persistentVolumeClaim=an_object("claimName", claimName=TEXT),
    emptyDir=an_object(medium=TEXT, sizeLimit=TEXT),
)
TEMPLATE = an_object(
    spec=an_object(
        "containers",
        containers=many(CONTAINER),
        volumes=many(VOLUME),
        tolerations=many(an_object(key=TEXT, operator=TEXT, effect=TEXT)),
    )
)
WORKERS = an_object(
    *("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=TEXT,
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
CLUSTER = an_object(
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=an_object(idleTimeoutSeconds=NUMBER),
    authOptions=an_object(mode={"enum": ["disabled", "token"]}),
    headGroupSpec=an_object("template", rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=many(WORKERS),
)
RAY_JOB = an_object(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=an_object("name", name=TEXT),
    spec=an_object(
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        backoffLimit=NUMBER,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=NUMBER,
        rayClusterSpec=CLUSTER,
    ),
)


@pytest.fixture
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILE.read_text()))


@pytest.fixture
def job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return copy.deepcopy(documents[1])


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"]["containers"][0] for group in groups]


def strict(schema: Any) -> Any:
    """Return an OpenAPI schema of Kubernetes as JSON schema that refuses fields which it does not list."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {
        name: {key: strict(part) for key, part in value.items()} if name == "properties" else strict(value)
        for name, value in schema.items()
        if not name.startswith("x-")
    }
    if "properties" in found and "x-kubernetes-preserve-unknown-fields" not in schema:
        found.setdefault("additionalProperties", False)
    return found


def test_fits_kuberays_fields(job: dict[str, Any]) -> None:
    jsonschema.validate(job, RAY_JOB)


def test_fits_the_published_schema(job: dict[str, Any]) -> None:
    path = os.environ.get(CRD_VARIABLE)
    if path is None:
        pytest.skip(f"{CRD_VARIABLE} is not set: crds/ray.io_rayjobs.yaml of the chart kuberay-operator")
    versions = yaml.safe_load(Path(path).read_text())["spec"]["versions"]
    (found,) = [entry["schema"]["openAPIV3Schema"] for entry in versions if entry["name"] == "v1"]
    schema = strict(found)
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(job, schema)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "entrypiont"), "python train.py"),
        (("spec", "backoffLimit"), "2"),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "password"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-gpus"), 0),
    ],
)
def test_wrong_fields_are_refused(path: tuple[str, ...], value: Any, job: dict[str, Any]) -> None:
    place = job
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, RAY_JOB)


def test_ray_has_raylights_version_and_flags_on_every_node(job: dict[str, Any]) -> None:
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == version("ray")
    for container in containers(job):
        assert {entry["name"]: entry["value"] for entry in container["env"]} == SERVE_FLAGS


def test_every_node_mounts_the_claim_at_shared(documents: list[dict[str, Any]], job: dict[str, Any]) -> None:
    claim = documents[0]
    assert (claim["kind"], claim["spec"]["accessModes"]) == ("PersistentVolumeClaim", ["ReadWriteMany"])
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (shared,) = [volume for volume in pod["volumes"] if volume["name"] == "shared"]
        assert shared["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
    head, *workers = containers(job)
    assert all("nvidia.com/gpu" in worker["resources"]["limits"] for worker in workers)
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    (group,) = cluster["workerGroupSpecs"]
    assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {"gpu_node": 16}


def test_the_command_is_one_of_raylights(job: dict[str, Any]) -> None:
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["raylight", "train"]
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    run_file = load_run_file(ROOT / "examples" / "quickstart.yaml", settings)
    assert run_file.output_dir.startswith("/shared/")
    assert not run_file.store.path.startswith("/shared/")
    assert run_file.learner.placement_timeout_s >= 900
    assert set(words) - set(settings) == {"raylight", "train", "/shared/agent/run.yaml", "--resume", "--set"}
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["PYTHONPATH"] == "/shared/agent"
