"""SageMaker endpoints with version 2 of the SageMaker SDK (pip install "sagemaker==2.*").

    python with_sdk_v2.py environment|archive|folder|components|async

Change the names at the top first. The requests it makes are recorded in tests/golden/sagemaker, and
a test holds them against botocore's own service model.
"""

import json
import sys
from typing import Any

import sagemaker
from sagemaker.async_inference import AsyncInferenceConfig
from sagemaker.compute_resource_requirements.resource_requirements import ResourceRequirements
from sagemaker.deserializers import JSONDeserializer
from sagemaker.enums import EndpointType
from sagemaker.iterators import LineIterator
from sagemaker.model import Model
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer

NAME = "assistant-8b"
ROLE = "arn:aws:iam::111122223333:role/SageMakerExecution"
IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/lmi-vllm:cuda"
BUCKET = "s3://my-bucket"
INSTANCE = "ml.g5.2xlarge"
# Both have to allow for the start: the platform's limit, and ours for the engine alone.
START_SECONDS = 1800
QUESTION = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 32}}


def environment(session: sagemaker.Session) -> None:
    """Everything in the environment, the weights from the hub."""
    env = {
        "HF_MODEL_ID": "acme/assistant-8b",
        "OPTION_MAX_MODEL_LEN": "16384",
        "OPTION_MODEL_LOADING_TIMEOUT": str(START_SECONDS),
    }
    deploy(Model(IMAGE, role=ROLE, name=NAME, env=env, sagemaker_session=session))
    ask(session)


def archive(session: sagemaker.Session) -> None:
    """A model.tar.gz with a serving.properties, with or without weights."""
    data = f"{BUCKET}/assistant-8b/model.tar.gz"
    deploy(Model(IMAGE, data, ROLE, name=NAME, sagemaker_session=session))
    ask(session)


def folder(session: sagemaker.Session) -> None:
    """Put serving.properties and weights into S3 as they are, without an archive."""
    source = {
        "S3Uri": f"{BUCKET}/assistant-8b/",
        "S3DataType": "S3Prefix",
        "CompressionType": "None",
    }
    model = Model(IMAGE, {"S3DataSource": source}, ROLE, name=NAME, sagemaker_session=session)
    deploy(model)
    ask(session)


def asynchronous(session: sagemaker.Session) -> None:
    """Answers are written to S3; up to an hour for each."""
    env = {"HF_MODEL_ID": "acme/assistant-8b", "OPTION_PREDICT_TIMEOUT": "3600"}
    model = Model(IMAGE, role=ROLE, name=NAME, env=env, sagemaker_session=session)
    answers = AsyncInferenceConfig(
        output_path=f"{BUCKET}/answers/",
        failure_path=f"{BUCKET}/failures/",  # else the SDK makes a bucket of its own for them
        max_concurrent_invocations_per_instance=64,
    )
    deploy(model, async_inference_config=answers)
    client = session.sagemaker_runtime_client
    question = f"{BUCKET}/questions/1.json"
    client.invoke_endpoint_async(
        EndpointName=NAME, ContentType="application/json", InputLocation=question
    )


def components(session: sagemaker.Session) -> None:
    """An inference component for the base model, and one for each adapter over it."""
    env = {
        "HF_MODEL_ID": "acme/assistant-8b",
        "OPTION_ENABLE_LORA": "true",
        "OPTION_MAX_LORAS": "8",
        "OPTION_MAX_LORA_RANK": "32",
    }
    model = Model(IMAGE, role=ROLE, name=NAME, env=env, sagemaker_session=session)
    deploy(
        model,
        endpoint_type=EndpointType.INFERENCE_COMPONENT_BASED,
        inference_component_name=f"{NAME}-base",
        resources=ResourceRequirements(
            requests={"num_accelerators": 1, "memory": 16384, "copies": 1}
        ),
        routing_config={"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    )
    # The SDK's own method always sends a variant and copies, which an adapter must not have.
    session.sagemaker_client.create_inference_component(
        InferenceComponentName=f"{NAME}-capitals",
        EndpointName=NAME,
        Specification={
            "BaseInferenceComponentName": f"{NAME}-base",
            "Container": {"ArtifactUrl": f"{BUCKET}/adapters/capitals.tar.gz"},
        },
    )
    session.wait_for_inference_component(f"{NAME}-capitals")
    ask(session, component=f"{NAME}-capitals")


def deploy(model: Model, **more: Any) -> None:
    """Create the model and the endpoint, and wait until it serves."""
    model.deploy(
        initial_instance_count=1,
        instance_type=INSTANCE,
        endpoint_name=NAME,
        model_data_download_timeout=START_SECONDS,
        container_startup_health_check_timeout=START_SECONDS,
        **more,
    )


def ask(session: sagemaker.Session, component: str | None = None) -> None:
    """Ask once whole and once as a stream of rows, one line each."""
    predictor = Predictor(
        NAME, session, JSONSerializer(), JSONDeserializer(), component_name=component
    )
    print(predictor.predict(QUESTION)["generated_text"])
    wanted = {"Accept": "application/jsonlines"}
    rows = predictor.predict_stream(
        QUESTION | {"stream": True}, initial_args=wanted, iterator=LineIterator
    )
    for row in rows:
        print(json.loads(row)["token"]["text"], end="", flush=True)
    print()


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
        print(f"usage: with_sdk_v2.py {'|'.join(CASES)}")
        return 2
    CASES[sys.argv[1]](sagemaker.Session())
    return 0


if __name__ == "__main__":
    sys.exit(main())
