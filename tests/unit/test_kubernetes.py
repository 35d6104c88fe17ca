"""config/kubernetes: valid by Kubernetes' own schemas, consistent with the server they start."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client import generate_latest

from lmi_vllm.cli import VERBS
from lmi_vllm.features.nodes.cluster import follows
from lmi_vllm.features.ray_serve.arguments import read_arguments
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate
from tests.support.custom_resources import (
    HTTP_ROUTE,
    INFERENCE_POOL,
    RAY_SERVICE,
    SCALED_OBJECT,
    pool_problems,
)

Faults = Callable[[object, dict[str, Any]], list[str]]
FOLDER = Path(__file__).parent.parent.parent / "config" / "kubernetes"
SHARED = ("OPTION_ADAPTER_STORE", "OPTION_ADAPTERS_STATE")
LEADER_WORKER_SET = "leader-worker-set.yaml"  # of a controller whose schema Kubernetes has not
RAY_SERVICES = ("ray-service.yaml", "ray-service-hyperpod.yaml")
CUSTOM = {
    "inference-pool.yaml": INFERENCE_POOL,
    "http-route.yaml": HTTP_ROUTE,
    "scaled-object.yaml": SCALED_OBJECT,
}
NOT_MANIFESTS = {
    "prometheus-adapter.yaml",
    LEADER_WORKER_SET,
    *RAY_SERVICES,
    *CUSTOM,
}  # the first: values of a Helm chart
MANIFESTS = sorted(path for path in FOLDER.glob("*.yaml") if path.name not in NOT_MANIFESTS)
ENGINE_END_SECONDS = 10
PROXY_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


def load(name: str) -> Any:
    """Return the one document of a file."""
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_manifest_is_valid(path: Path, version: str) -> None:
    """Strict: an unknown field is an error too."""
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.fixture(scope="module")
def faults() -> Faults:
    """Return what is wrong with a document by a schema."""
    import jsonschema  # noqa: PLC0415 (it compiles grammars for seconds)

    def faults_of(document: object, schema: dict[str, Any]) -> list[str]:
        validator = jsonschema.validators.validator_for(schema)
        validator.check_schema(schema)
        return [fault.message for fault in validator(schema).iter_errors(document)]

    return faults_of


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_resource_is_valid(faults: Faults, name: str) -> None:
    """By its API's reference, strictly; what it names is there."""
    assert faults(load(name), CUSTOM[name]) == []
    broken = load(name)
    broken["spec"]["unknown"] = 1
    assert faults(broken, CUSTOM[name])


def test_pool_s_schema_refuses_as_its_definition_does(faults: Faults) -> None:
    """Bounds, patterns and enums of each field, and the two rules beyond the schema."""
    pool = load("inference-pool.yaml")
    assert pool_problems(pool) == []
    spec = pool["spec"]
    picker = spec["endpointPickerRef"]
    for wrong in (
        {**spec, "selector": {"app": "lmi"}},
        {**spec, "selector": {"matchLabels": {}}},
        {**spec, "selector": {"matchLabels": {"app": "-"}}},
        {**spec, "targetPorts": []},
        {**spec, "targetPorts": [{"number": 0}]},
        {**spec, "targetPortNumber": 8080},
        {**spec, "appProtocol": "grpc"},
        {**spec, "extensionRef": picker},
        {**spec, "endpointPickerRef": {**picker, "failureMode": "Open"}},
        {**spec, "endpointPickerRef": {**picker, "portNumber": 9002}},
        {name: value for name, value in spec.items() if name != "endpointPickerRef"},
    ):
        assert faults({**pool, "spec": wrong}, INFERENCE_POOL), wrong
    del picker["port"]
    spec["targetPorts"] *= 2
    assert faults(pool, INFERENCE_POOL) == []
    assert len(pool_problems(pool)) == 2


def test_inference_pool_selects_the_pods_and_the_route_targets_it() -> None:
    """Their labels and port; the route's other half is the Service."""
    pool, deployment = load("inference-pool.yaml"), load("deployment.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (port,) = server_container()["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    first, rest = load("http-route.yaml")["spec"]["rules"]
    group = pool["apiVersion"].partition("/")[0]
    own = {"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}
    assert first["backendRefs"] == [own]
    service = load("service.yaml")
    (offered,) = service["spec"]["ports"]
    assert rest["backendRefs"] == [{"name": service["metadata"]["name"], "port": offered["port"]}]


def test_scaled_object_is_the_autoscaler_s_rule() -> None:
    """The same target, bounds, threshold, metric and behavior."""
    keda, own = load("scaled-object.yaml")["spec"], load("horizontal-pod-autoscaler.yaml")["spec"]
    assert keda["scaleTargetRef"] == own["scaleTargetRef"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (
        own["minReplicas"],
        own["maxReplicas"],
    )
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == own["behavior"]
    (trigger,), (metric,) = keda["triggers"], own["metrics"]
    assert metric["pods"]["metric"]["name"] in trigger["metadata"]["query"]
    assert trigger["metadata"]["threshold"] == metric["pods"]["target"]["averageValue"]


def server_container() -> dict[str, Any]:
    """Return the container that serves."""
    (container,) = load("deployment.yaml")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_environment_holds_only_settings_that_exist() -> None:
    """Each variable is known and valid, as `explain --strict` would say."""
    environ = {item["name"]: item["value"] for item in server_container()["env"]}
    settings = load_settings(environ | {"LMI_STRICT": "true"})
    assert not settings.errors


def test_adapters_are_settings_for_every_replica() -> None:
    """A store that all replicas read and an object that they share; the deployment reads both."""
    config = load("adapters.yaml")
    (source,) = server_container()["envFrom"]
    assert source["configMapRef"]["name"] == config["metadata"]["name"]
    environ = {item["name"]: item["value"] for item in server_container()["env"]}
    settings = load_settings(environ | config["data"] | {"LMI_STRICT": "true"})
    assert not settings.errors
    values = translate(settings, None, Devices(1)).arguments.values
    assert values["enable_lora"] is True
    assert all(config["data"][name].startswith("s3://my-bucket/") for name in SHARED)
    assert not config["data"][SHARED[1]].startswith(config["data"][SHARED[0]])


def test_grace_period_covers_stop_hook_drain_and_engine() -> None:
    """Kubernetes counts preStop into the grace period, and kills at its end."""
    environ = {item["name"]: item["value"] for item in server_container()["env"]}
    drain = load_settings(environ).server.shutdown_timeout
    wait = int(server_container()["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = load("deployment.yaml")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert isinstance(drain, int | float)
    assert grace >= wait + drain + ENGINE_END_SECONDS


def test_probes_ask_routes_that_exist_and_wait_for_the_model() -> None:
    """The start may take as long as model_loading_timeout allows."""
    container = server_container()
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    assert paths == {"startup": "/ping", "readiness": "/ready", "liveness": "/live"}
    limit = load_settings({}).model.model_loading_timeout
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= limit


def test_verbs_are_ours_and_the_fetched_model_is_the_one_served() -> None:
    """The init container fetches to where the server looks."""
    spec = load("deployment.yaml")["spec"]["template"]["spec"]
    (fetch,) = spec["initContainers"]
    assert fetch["args"][0] in VERBS
    assert server_container()["args"][0] in VERBS
    environ = {item["name"]: item["value"] for item in server_container()["env"]}
    assert environ["HF_MODEL_ID"] == fetch["args"][-1]


def test_autoscaler_and_adapter_use_metrics_of_a_real_exposition() -> None:
    """The names stand in what the registry prints, as gauges."""
    exposition = generate_latest().decode()
    for metric in load("horizontal-pod-autoscaler.yaml")["spec"]["metrics"]:
        name = metric["pods"]["metric"]["name"]
        assert f"# TYPE {name} gauge" in exposition
        (rule,) = load("prometheus-adapter.yaml")["rules"]["custom"]
        assert re.match(r"\w+", rule["seriesQuery"])[0] == name  # type: ignore[index]
        queue = {item["name"]: item["value"] for item in server_container()["env"]}
        target = int(metric["pods"]["target"]["averageValue"])
        assert target < int(queue["SERVING_JOB_QUEUE_SIZE"])


def test_selectors_meet_the_pods() -> None:
    """Service, budget and deployment mean the same pods."""
    labels = load("deployment.yaml")["spec"]["template"]["metadata"]["labels"]
    assert load("service.yaml")["spec"]["selector"] == labels
    assert load("pod-disruption-budget.yaml")["spec"]["selector"]["matchLabels"] == labels
    scaled = load("horizontal-pod-autoscaler.yaml")["spec"]["scaleTargetRef"]["name"]
    assert scaled == load("deployment.yaml")["metadata"]["name"]


def test_leader_service_finds_leaders_alone() -> None:
    """By labels of the leader's pods that workers have not; else as the other Service."""
    group = load(LEADER_WORKER_SET)["spec"]["leaderWorkerTemplate"]
    labels = {role: group[f"{role}Template"]["metadata"]["labels"] for role in ("leader", "worker")}
    service = load("leader-service.yaml")
    selector = service["spec"].pop("selector")
    assert selector.items() <= labels["leader"].items()
    assert not selector.items() <= labels["worker"].items()
    other = load("service.yaml")
    del other["spec"]["selector"]
    assert service == other


@pytest.mark.parametrize("role", ["leader", "worker"])
def test_nodes_of_a_leader_worker_set_share_the_model(role: str) -> None:
    """Valid pods, known settings, GPUs for every rank; a node behind the leader has no probes."""
    group = load(LEADER_WORKER_SET)["spec"]["leaderWorkerTemplate"]
    template = group[f"{role}Template"]
    pod = {"apiVersion": "v1", "kind": "Pod"} | template
    pod["metadata"] = pod["metadata"] | {"name": "lmi-0"}
    kubernetes_validate.validate(pod, "1.34", strict=True)
    (container,) = template["spec"]["containers"]
    assert ("readinessProbe" in container) is (role == "leader")
    environ = {item["name"]: item["value"] for item in container["env"]}
    environ |= {"LWS_GROUP_SIZE": str(group["size"]), "LWS_LEADER_ADDRESS": "lmi-0.lmi.default"}
    environ |= {"LWS_WORKER_INDEX": "0" if role == "leader" else "1", "LMI_STRICT": "true"}
    settings = load_settings(environ)
    assert not settings.errors
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    result = translate(settings, None, Devices(gpus))
    assert not result.errors
    values = result.arguments.values
    ranks = int(str(values["tensor_parallel_size"])) * int(str(values["pipeline_parallel_size"]))
    assert ranks == gpus * group["size"]
    assert follows(settings) is (role == "worker")


@pytest.mark.parametrize("name", RAY_SERVICES)
def test_ray_service_is_valid(faults: Faults, name: str) -> None:
    """Its own fields by KubeRay's reference, and its pods by Kubernetes' schema, strictly."""
    service = load(name)
    assert faults(service, RAY_SERVICE) == []
    spec = service["spec"]["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"},
            "spec": group["template"]["spec"],
        }  # fmt: skip
        kubernetes_validate.validate(pod, "1.34", strict=True)
    service["spec"]["unknown"] = 1
    assert faults(service, RAY_SERVICE)


@pytest.mark.parametrize("name", RAY_SERVICES)
def test_ray_service_fits_its_nodes(name: str) -> None:
    """A node has the GPUs of a replica, and longer than Ray and the server take to end."""
    spec = load(name)["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (deployment,) = application["deployments"]
    read = read_arguments(application["args"])
    settings = load_settings(read.variables)
    degree = settings.model.tensor_parallel_degree
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    gpus = int(pod["containers"][0]["resources"]["requests"]["nvidia.com/gpu"])
    assert gpus == read.gpus
    assert degree in (None, "max", read.gpus), degree
    assert workers["maxReplicas"] >= deployment["autoscaling_config"]["max_replicas"]
    assert pod["terminationGracePeriodSeconds"] > deployment["graceful_shutdown_timeout_s"]
    assert read.variables["OPTION_ADAPTER_STORE"]
    for group in (spec["rayClusterConfig"]["headGroupSpec"], workers):
        variables = group["template"]["spec"]["containers"][0]["env"]
        assert {"name": PROXY_CALLBACK, "value": "lmi_vllm.ray:middlewares"} in variables
