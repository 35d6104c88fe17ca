"""Hook files as users have them: written for LMI, run here unchanged."""

from pathlib import Path
from textwrap import dedent
from typing import Final

# A payload of the client's own shape, and an answer that names what it was made from.
FORMATTERS = """
    import logging, os
    from djl_python import Input
    from djl_python.encode_decode import decode
    from djl_python.input_parser import input_formatter
    from djl_python.output_formatter import TextGenerationOutput, output_formatter
    from djl_python.request_io import TextInput
    import prompts

    logger = logging.getLogger(__name__)

    class OwnInput(TextInput):
        trace: str

    @input_formatter
    def to_payload(decoded_payload, tokenizer=None):
        if "ask" in decoded_payload:
            return prompts.payload_of(decoded_payload)
        return decoded_payload

    @output_formatter
    def to_answer(output, **kwargs):
        if isinstance(output, str):
            return output
        return {"base": True, "answer": prompts.text_of(output)}
"""
PROMPTS = """
    def payload_of(asked):
        rest = {key: value for key, value in asked.items() if key != "ask"}
        return {"inputs": asked["ask"], "parameters": {"max_new_tokens": 5}, **rest}

    def text_of(response):
        choices = response["choices"] if isinstance(response, dict) else response.choices
        return [one.text if hasattr(one, "text") else one.message.content for one in choices]
"""

# For SageMaker's library in vLLM, with `CUSTOM_POST_PROCESS=model:after`.
SAGEMAKER_CODE: Final = """
from fastapi import Request
from fastapi.responses import JSONResponse
from model_hosting_container_standards import sagemaker
from model_hosting_container_standards.common.fastapi.middleware import custom_middleware


@sagemaker.custom_ping_handler
async def ping():
    return JSONResponse({"status": "mine"})


@custom_middleware("throttle")
async def throttle(request, call_next):
    response = await call_next(request)
    response.headers["x-throttled"] = "no"
    return response


async def custom_sagemaker_invocation_handler(raw_request: Request):
    return JSONResponse({"asked": await raw_request.json()})


async def after(response):
    response.headers["x-after"] = "yes"
    return response
"""


def write_code(folder: Path, text: str, name: str = "model.py") -> Path:
    """Write a file of user code into the folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(dedent(text), encoding="utf-8")
    return path
