"""SageMaker endpoints with boto3: the requests, one function each; `main` sends those of one case.

    python with_boto3.py environment|archive|folder|components|async

Change the names at the top first. A test holds every request against botocore's own service model.
"""

import json
import sys
from typing import Any

NAME = "assistant-8b"
ROLE = "arn:aws:iam::111122223333:role/SageMakerExecution"
IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/lmi-vllm:cuda"
BUCKET = "s3://my-bucket"
INSTANCE = "ml.g5.2xlarge"
# Both have to allow for the start: the platform's limit, and ours for the engine alone.
START_SECONDS = 1800

Request = dict[str, Any]


def environment_model() -> Request:
    """create_model: everything in the environment, the weights from the hub."""
    environment = {
        "HF_MODEL_ID": "acme/assistant-8b",
        "OPTION_MAX_MODEL_LEN": "16384",
        "OPTION_MODEL_LOADING_TIMEOUT": str(START_SECONDS),
    }
    return model({"Image": IMAGE, "Environment": environment})


def archive_model() -> Request:
    """create_model: a model.tar.gz with a serving.properties, with or without weights."""
    return model({"Image": IMAGE, "ModelDataUrl": f"{BUCKET}/assistant-8b/model.tar.gz"})


def folder_model() -> Request:
    """create_model: serving.properties and weights as they lie in S3, without an archive."""
    source = {
        "S3Uri": f"{BUCKET}/assistant-8b/",
        "S3DataType": "S3Prefix",
        "CompressionType": "None",
    }
    return model({"Image": IMAGE, "ModelDataSource": {"S3DataSource": source}})


def model(container: Request) -> Request:
    """create_model: a container; network isolation is possible where the weights are in S3."""
    return {"ModelName": NAME, "ExecutionRoleArn": ROLE, "PrimaryContainer": container}


def endpoint_config() -> Request:
    """create_endpoint_config: one variant; SageMaker allows 60 s to answer, streams 8 minutes."""
    return {
        "EndpointConfigName": NAME,
        "ProductionVariants": [
            {
                "VariantName": "AllTraffic",
                "ModelName": NAME,
                "InstanceType": INSTANCE,
                "InitialInstanceCount": 1,
                "ModelDataDownloadTimeoutInSeconds": START_SECONDS,
                "ContainerStartupHealthCheckTimeoutInSeconds": START_SECONDS,
            }
        ],
    }


def async_endpoint_config() -> Request:
    """create_endpoint_config: answers are written to S3; up to an hour for each."""
    return endpoint_config() | {
        "AsyncInferenceConfig": {
            "OutputConfig": {"S3OutputPath": f"{BUCKET}/answers/"},
            "ClientConfig": {"MaxConcurrentInvocationsPerInstance": 64},
        }
    }


def component_endpoint_config() -> Request:
    """create_endpoint_config: instances for inference components, which bring the models."""
    return {
        "EndpointConfigName": NAME,
        "ExecutionRoleArn": ROLE,
        "ProductionVariants": [
            {
                "VariantName": "AllTraffic",
                "InstanceType": INSTANCE,
                "InitialInstanceCount": 1,
                "ModelDataDownloadTimeoutInSeconds": START_SECONDS,
                "ContainerStartupHealthCheckTimeoutInSeconds": START_SECONDS,
                "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
            }
        ],
    }


def component_model() -> Request:
    """create_model: the base model of adapter components; adapters have to be enabled here."""
    environment = {
        "HF_MODEL_ID": "acme/assistant-8b",
        "OPTION_ENABLE_LORA": "true",
        "OPTION_MAX_LORAS": "8",
        "OPTION_MAX_LORA_RANK": "32",
    }
    return model({"Image": IMAGE, "Environment": environment})


def base_component() -> Request:
    """create_inference_component: the base model."""
    return {
        "InferenceComponentName": f"{NAME}-base",
        "EndpointName": NAME,
        "VariantName": "AllTraffic",
        "Specification": {
            "ModelName": NAME,
            "StartupParameters": {
                "ModelDataDownloadTimeoutInSeconds": START_SECONDS,
                "ContainerStartupHealthCheckTimeoutInSeconds": START_SECONDS,
            },
            "ComputeResourceRequirements": {
                "NumberOfAcceleratorDevicesRequired": 1,
                "MinMemoryRequiredInMb": 16384,
            },
        },
        "RuntimeConfig": {"CopyCount": 1},
    }


def adapter_component() -> Request:
    """create_inference_component: an adapter; SageMaker unpacks it and posts it to /adapters."""
    return {
        "InferenceComponentName": f"{NAME}-capitals",
        "EndpointName": NAME,
        "Specification": {
            "BaseInferenceComponentName": f"{NAME}-base",
            "Container": {"ArtifactUrl": f"{BUCKET}/adapters/capitals.tar.gz"},
        },
    }


def endpoint() -> Request:
    """create_endpoint."""
    return {"EndpointName": NAME, "EndpointConfigName": NAME}


def invocation() -> Request:
    """invoke_endpoint, and invoke_endpoint_with_response_stream with `stream` in the body."""
    body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 32}}
    return {
        "EndpointName": NAME,
        "ContentType": "application/json",
        "Body": json.dumps(body).encode(),
    }


def stream_invocation() -> Request:
    """invoke_endpoint_with_response_stream: rows arrive in pieces that need not end with a line."""
    body = {"inputs": "The moon is", "parameters": {"max_new_tokens": 32}, "stream": True}
    return invocation() | {"Body": json.dumps(body).encode(), "Accept": "application/jsonlines"}


def adapter_invocation() -> Request:
    """invoke_endpoint: the adapter's component chooses it."""
    return invocation() | {"InferenceComponentName": f"{NAME}-capitals"}


def async_invocation() -> Request:
    """invoke_endpoint_async: the body lies in S3."""
    return {
        "EndpointName": NAME,
        "ContentType": "application/json",
        "InputLocation": f"{BUCKET}/questions/1.json",
    }


# Case -> what to send, in order: the operation of the client, and its request.
CASES = {
    "environment": [
        ("create_model", environment_model),
        ("create_endpoint_config", endpoint_config),
        ("create_endpoint", endpoint),
    ],
    "archive": [
        ("create_model", archive_model),
        ("create_endpoint_config", endpoint_config),
        ("create_endpoint", endpoint),
    ],
    "folder": [
        ("create_model", folder_model),
        ("create_endpoint_config", endpoint_config),
        ("create_endpoint", endpoint),
    ],
    "async": [
        ("create_model", environment_model),
        ("create_endpoint_config", async_endpoint_config),
        ("create_endpoint", endpoint),
    ],
    "components": [
        ("create_model", component_model),
        ("create_endpoint_config", component_endpoint_config),
        ("create_endpoint", endpoint),
        ("create_inference_component", base_component),
        ("create_inference_component", adapter_component),
    ],
}
INVOCATIONS = [
    ("invoke_endpoint", invocation),
    ("invoke_endpoint", adapter_invocation),
    ("invoke_endpoint_with_response_stream", stream_invocation),
    ("invoke_endpoint_async", async_invocation),
]


def main() -> int:
    """Send the requests of the case named on the command line."""
    import boto3  # noqa: PLC0415 - the requests alone need none

    if sys.argv[1:2] not in [[case] for case in CASES]:
        print(f"usage: with_boto3.py {'|'.join(CASES)}")
        return 2
    client = boto3.client("sagemaker")
    for operation, request in CASES[sys.argv[1]]:
        if request is base_component:
            client.get_waiter("endpoint_in_service").wait(EndpointName=NAME)
        if request is adapter_component:
            wait_for_component(client, f"{NAME}-base")
        getattr(client, operation)(**request())
        print(operation)
    return 0


def wait_for_component(client: Any, name: str) -> None:
    """Return once a component serves; boto3 has no waiter for it."""
    import time  # noqa: PLC0415

    while True:
        status = client.describe_inference_component(InferenceComponentName=name)
        if status["InferenceComponentStatus"] == "InService":
            return
        if status["InferenceComponentStatus"] == "Failed":
            raise RuntimeError(f"{name}: {status.get('FailureReason')}")
        time.sleep(15)


if __name__ == "__main__":
    sys.exit(main())
