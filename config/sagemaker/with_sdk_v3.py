"""SageMaker endpoints with version 3 of the SageMaker SDK (pip install "sagemaker>=3").

    python with_sdk_v3.py environment|archive|folder|components|async

Change the names at the top first. The requests it makes are recorded in tests/golden/sagemaker, and
a test holds them against botocore's own service model.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import boto3
from sagemaker.core.resources import Endpoint, EndpointConfig, InferenceComponent, Model
from sagemaker.core.shapes import (
    AsyncInferenceClientConfig,
    AsyncInferenceConfig,
    AsyncInferenceOutputConfig,
    ContainerDefinition,
    InferenceComponentComputeResourceRequirements,
    InferenceComponentContainerSpecification,
    InferenceComponentRuntimeConfig,
    InferenceComponentSpecification,
    InferenceComponentStartupParameters,
    ModelDataSource,
    ProductionVariant,
    ProductionVariantRoutingConfig,
    S3ModelDataSource,
)

NAME = "assistant-8b"
ROLE = "arn:aws:iam::111122223333:role/SageMakerExecution"
IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/lmi-vllm:cuda"
BUCKET = "s3://my-bucket"
INSTANCE = "ml.g5.2xlarge"
# Both have to allow for the start: the platform's limit, and ours for the engine alone.
START_SECONDS = 1800
QUESTION = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 32}}
JSON = "application/json"


def environment(session: boto3.Session) -> None:
    """Everything in the environment, the weights from the hub."""
    env = {
        "HF_MODEL_ID": "acme/assistant-8b",
        "OPTION_MAX_MODEL_LEN": "16384",
        "OPTION_MODEL_LOADING_TIMEOUT": str(START_SECONDS),
    }
    ask(deploy(session, ContainerDefinition(image=IMAGE, environment=env)), session)


def archive(session: boto3.Session) -> None:
    """A model.tar.gz with a serving.properties, with or without weights."""
    data = f"{BUCKET}/assistant-8b/model.tar.gz"
    ask(deploy(session, ContainerDefinition(image=IMAGE, model_data_url=data)), session)


def folder(session: boto3.Session) -> None:
    """Put serving.properties and weights into S3 as they are, without an archive."""
    source = S3ModelDataSource(
        s3_uri=f"{BUCKET}/assistant-8b/", s3_data_type="S3Prefix", compression_type="None"
    )
    data = ModelDataSource(s3_data_source=source)
    ask(deploy(session, ContainerDefinition(image=IMAGE, model_data_source=data)), session)


def asynchronous(session: boto3.Session) -> None:
    """Answers are written to S3; up to an hour for each."""
    env = {"HF_MODEL_ID": "acme/assistant-8b", "OPTION_PREDICT_TIMEOUT": "3600"}
    answers = AsyncInferenceConfig(
        output_config=AsyncInferenceOutputConfig(s3_output_path=f"{BUCKET}/answers/"),
        client_config=AsyncInferenceClientConfig(max_concurrent_invocations_per_instance=64),
    )
    container = ContainerDefinition(image=IMAGE, environment=env)
    endpoint = deploy(session, container, async_inference_config=answers)
    question = f"{BUCKET}/questions/1.json"
    endpoint.invoke_async(question, content_type=JSON, session=session)


def components(session: boto3.Session) -> None:
    """An inference component for the base model, and one for each adapter over it."""
    env = {
        "HF_MODEL_ID": "acme/assistant-8b",
        "OPTION_ENABLE_LORA": "true",
        "OPTION_MAX_LORAS": "8",
        "OPTION_MAX_LORA_RANK": "32",
    }
    model = ContainerDefinition(image=IMAGE, environment=env)
    Model.create(NAME, primary_container=model, execution_role_arn=ROLE, session=session)
    variant = ProductionVariant(
        variant_name="AllTraffic",
        instance_type=INSTANCE,
        initial_instance_count=1,
        routing_config=ProductionVariantRoutingConfig(
            routing_strategy="LEAST_OUTSTANDING_REQUESTS"
        ),
    )
    endpoint = start(session, variant, execution_role_arn=ROLE)
    base = InferenceComponentSpecification(
        model_name=NAME,
        startup_parameters=InferenceComponentStartupParameters(
            model_data_download_timeout_in_seconds=START_SECONDS,
            container_startup_health_check_timeout_in_seconds=START_SECONDS,
        ),
        compute_resource_requirements=InferenceComponentComputeResourceRequirements(
            number_of_accelerator_devices_required=1, min_memory_required_in_mb=16384
        ),
    )
    adapter = InferenceComponentSpecification(
        base_inference_component_name=f"{NAME}-base",
        container=InferenceComponentContainerSpecification(
            artifact_url=f"{BUCKET}/adapters/capitals.tar.gz"
        ),
    )
    InferenceComponent.create(
        f"{NAME}-base",
        NAME,
        variant_name="AllTraffic",
        specification=base,
        runtime_config=InferenceComponentRuntimeConfig(copy_count=1),
        session=session,
    ).wait_for_status("InService")
    InferenceComponent.create(
        f"{NAME}-capitals", NAME, specification=adapter, session=session
    ).wait_for_status("InService")
    ask(endpoint, session, inference_component_name=f"{NAME}-capitals")


def deploy(session: boto3.Session, container: ContainerDefinition, **more: Any) -> Endpoint:
    """Create a model and its endpoint, and return it once it serves."""
    Model.create(NAME, primary_container=container, execution_role_arn=ROLE, session=session)
    variant = ProductionVariant(
        variant_name="AllTraffic",
        model_name=NAME,
        instance_type=INSTANCE,
        initial_instance_count=1,
        model_data_download_timeout_in_seconds=START_SECONDS,
        container_startup_health_check_timeout_in_seconds=START_SECONDS,
    )
    return start(session, variant, **more)


def start(session: boto3.Session, variant: ProductionVariant, **more: Any) -> Endpoint:
    """Create an endpoint of one variant, and return it once it serves."""
    EndpointConfig.create(NAME, [variant], session=session, **more)
    endpoint = Endpoint.create(NAME, NAME, session=session)
    endpoint.wait_for_status("InService")
    return endpoint


def ask(endpoint: Endpoint, session: boto3.Session, **more: str) -> None:
    """Ask once whole and once as a stream of rows, one line each."""
    body = json.dumps(QUESTION).encode()
    answer = endpoint.invoke(body, content_type=JSON, session=session, **more)
    print(json.loads(answer.body.read())["generated_text"])
    # Endpoint.invoke_with_response_stream of 3.27 fails on its own: 'EventStream' has no 'get'.
    component = more.get("inference_component_name")
    stream = session.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
        EndpointName=NAME,
        ContentType=JSON,
        Accept="application/jsonlines",
        Body=json.dumps(QUESTION | {"stream": True}).encode(),
        **({"InferenceComponentName": component} if component else {}),
    )
    for row in lines(stream["Body"]):
        print(json.loads(row)["token"]["text"], end="", flush=True)
    print()


def lines(events: Any) -> Iterator[bytes]:
    """Yield the rows of a stream: its parts need not end with a line."""
    kept = b""
    for event in events:
        *whole, kept = (kept + event["PayloadPart"]["Bytes"]).split(b"\n")
        yield from filter(None, whole)


CASES = {
    "environment": environment,
    "archive": archive,
    "folder": folder,
    "components": components,
    "async": asynchronous,
}


def main() -> int:
    """Deploy the case named on the command line."""
    if sys.argv[1:2] not in [[case] for case in CASES]:
        print(f"usage: with_sdk_v3.py {'|'.join(CASES)}")
        return 2
    CASES[sys.argv[1]](boto3.Session())
    return 0


if __name__ == "__main__":
    sys.exit(main())
