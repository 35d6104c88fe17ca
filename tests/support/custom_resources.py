"""Schemas of the custom resources in config/kubernetes, from their definitions.

Strict: a field that is not named here is an error, where Kubernetes drops it silently.

- InferencePool `inference.networking.k8s.io/v1`: `inference_pool.json`, every field and bound of
  the definition's spec, recorded with its source and commit. No package of PyPI or npm that we know
  has it. Its two rules that no JSON schema can say are in `pool_problems`.
- HTTPRoute `gateway.networking.k8s.io/v1`, as far as our manifests use it: the reference of
  Gateway API v1, and npm's @kubernetes-models/gateway-api 2.0.0.
- ScaledObject `keda.sh/v1alpha1`, likewise: the reference of KEDA 2.22, and npm's
  @kubernetes-models/keda 2.0.0.
- RayService `ray.io/v1`, likewise: the API reference of KubeRay 1.5. Its pods are checked by
  Kubernetes' own schema, and `serveConfigV2` by Ray's (`integration/ray_serve.py`).

`integration/kubernetes_manifests.py` validates HTTPRoute and ScaledObject with those packages,
generated from the controllers' own types.
"""

import json
from pathlib import Path
from typing import Any, Final

_NAME: Final = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
_PORT: Final = {"type": "integer", "minimum": 1, "maximum": 65535}
_TEXT: Final = {"type": "string", "minLength": 1}
_DURATION: Final = {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}
_COUNT: Final = {"type": "integer", "minimum": 0}


def _record(required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": fields,
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _record(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_record(("name",), name=_NAME, labels={"type": "object"}),
        spec=spec,
    )


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a definition's schema that refuses fields which it does not name."""
    fields = {name: _strict(field) for name, field in schema.get("properties", {}).items()}
    items = {"items": _strict(schema["items"])} if "items" in schema else {}
    closed = {"properties": fields, "additionalProperties": False} if fields else {}
    return {**schema, **items, **closed}


def pool_problems(pool: dict[str, Any]) -> list[str]:
    """Return what the definition's two rules (x-kubernetes-validations) say against a pool."""
    picker = pool["spec"]["endpointPickerRef"]
    ports = [port["number"] for port in pool["spec"]["targetPorts"]]
    found = []
    if picker.get("kind", "Service") == "Service" and "port" not in picker:
        found.append("a picker that is a Service needs its port")
    if len({*ports}) < len(ports):
        found.append("a port is named twice")
    return found


RECORDED_POOL: Final = json.loads(Path(__file__).with_name("inference_pool.json").read_text())
INFERENCE_POOL: Final = _resource(
    RECORDED_POOL["apiVersion"], RECORDED_POOL["kind"], _strict(RECORDED_POOL["spec"])
)
HTTP_ROUTE: Final = _resource(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    _record(
        ("rules",),
        parentRefs=_list(_record(("name",), name=_NAME, namespace=_NAME, sectionName=_NAME), 32),
        hostnames=_list(_TEXT, 16),
        rules=_list(
            _record(
                (),
                matches=_list(
                    _record(
                        (),
                        path=_record(
                            (),
                            type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                            value={"type": "string", "pattern": "^/"},
                        ),
                    ),
                    64,
                ),
                backendRefs=_list(
                    _record(
                        ("name",),
                        group={"type": "string"},
                        kind=_TEXT,
                        name=_NAME,
                        port=_PORT,
                        weight=_COUNT,
                    ),
                    16,
                ),
                timeouts=_record(
                    (),
                    request=_DURATION,
                    backendRequest=_DURATION,
                ),
            ),
            16,
        ),
    ),
)
SCALED_OBJECT: Final = _resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    _record(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=_record(("name",), apiVersion=_TEXT, kind=_TEXT, name=_NAME),
        pollingInterval=_COUNT,
        cooldownPeriod=_COUNT,
        minReplicaCount=_COUNT,
        maxReplicaCount=_COUNT,
        triggers=_list(
            _record(
                ("type", "metadata"),
                type={"const": "prometheus"},
                name=_TEXT,
                metricType={"enum": ["AverageValue", "Value"]},
                metadata=_record(
                    ("serverAddress", "query", "threshold"),
                    **dict.fromkeys(
                        ("serverAddress", "query", "threshold", "activationThreshold"), _TEXT
                    ),
                ),
            ),
            16,
        ),
        # Its behavior is that of the autoscaler, which Kubernetes' own schema has.
        advanced=_record(
            (), horizontalPodAutoscalerConfig=_record((), behavior={"type": "object"})
        ),
    ),
)

_GROUP: Final = {
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    "template": _record(("spec",), spec={"type": "object"}, metadata={"type": "object"}),
}
RAY_SERVICE: Final = _resource(
    "ray.io/v1",
    "RayService",
    _record(
        ("serveConfigV2", "rayClusterConfig"),
        upgradeStrategy=_record(("type",), type={"enum": ["NewCluster", "None"]}),
        serveConfigV2=_TEXT,
        rayClusterConfig=_record(
            ("headGroupSpec", "workerGroupSpecs"),
            rayVersion=_TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=_record(("rayStartParams", "template"), **_GROUP),
            workerGroupSpecs=_list(
                _record(
                    ("groupName", "minReplicas", "maxReplicas", "template"),
                    groupName=_NAME,
                    replicas=_COUNT,
                    minReplicas=_COUNT,
                    maxReplicas=_COUNT,
                    **_GROUP,
                ),
                8,
            ),
        ),
    ),
)
