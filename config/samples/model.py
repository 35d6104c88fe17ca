"""Code of your own around the engine: a rule before each prompt, another answer than LMI's.

Put it into the model directory. `lmi-vllm validate` reads it and names what would be refused.
docs/custom-code.md has the contract of each function.
"""

import json

from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

RULE = "Answer in one sentence.\n"


@input_formatter
def with_rule(payload):
    """Return the payload with the rule before `inputs`; others are as they came."""
    if isinstance(payload, dict) and isinstance(payload.get("inputs"), str):
        return {**payload, "inputs": RULE + payload["inputs"]}
    return payload


@output_formatter
def as_answer(response):
    """Return the body of an answer; an event of a stream comes as text and stays as it is."""
    if isinstance(response, str):
        return response
    choice = response.choices[0]
    text = choice.text if hasattr(choice, "text") else choice.message.content
    return json.dumps({"answer": text.strip(), "tokens": response.usage.completion_tokens})
