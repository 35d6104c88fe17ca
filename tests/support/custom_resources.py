"""Schemas of the custom resources in config/kubernetes, written from their API references.

Strict: a field that is not named here is an error. Only what our manifests may use is here.
Gateway API Inference Extension v1 (InferencePool), Gateway API v1 (HTTPRoute), KEDA 2.22.
"""

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


INFERENCE_POOL: Final = _resource(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    _record(
        ("selector", "targetPorts", "endpointPickerRef"),
        selector=_record(
            ("matchLabels",),
            matchLabels={"type": "object", "additionalProperties": {"type": "string"}},
        ),
        targetPorts=_list(_record(("number",), number=_PORT), 8),
        appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
        endpointPickerRef=_record(
            ("name", "port"),  # a port, where the picker is a Service
            group={"type": "string"},
            kind=_TEXT,
            name=_NAME,
            port=_record(("number",), number=_PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
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
