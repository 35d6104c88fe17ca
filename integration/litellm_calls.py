"""The program that `client_litellm.py` runs in LiteLLM's own environment: calls, as JSON."""

import json
import sys

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def main(url: str) -> None:
    """Print what LiteLLM makes of each way to call an endpoint whose proxy is at `url`."""
    import litellm  # noqa: PLC0415 (only in its own environment)

    found = {}
    for model in ("sagemaker/demo", "sagemaker_chat/demo"):
        for path in ("invocations", "invocations-response-stream"):
            is_streaming = path != "invocations"
            answer = litellm.completion(
                model=model,
                messages=MESSAGES,
                max_tokens=12,
                temperature=0,
                stream=is_streaming,
                hf_model_name="lmi",  # else it sends the endpoint's name as the model's
                sagemaker_base_url=f"{url}/endpoints/demo/{path}",
            )
            if is_streaming:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            else:
                text = answer.choices[0].message.content
            found[f"{model} {path}"] = text
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
