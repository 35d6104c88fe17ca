"""What vLLM counts for each sequence anyway, handed to the record of the request it belongs to."""

from typing import Any

from lmi_vllm.telemetry.records import WorkFigures, current_record


class SequenceWork:
    """One sequence inside vLLM; reads its counters when asked, never while it runs."""

    __slots__ = ("_has_prompt", "_state")

    def __init__(self, state: Any, *, has_prompt: bool) -> None:
        self._state = state  # a RequestState of vLLM's output processor
        self._has_prompt = has_prompt

    def figures(self) -> WorkFigures:
        """Return vLLM's counters; without its statistics (`disable_log_stats`) only tokens."""
        state = self._state
        prompt = int(state.prompt_len) if self._has_prompt else 0
        stats = state.stats
        if stats is None:
            detokenizer = state.detokenizer
            return WorkFigures(prompt, detokenizer.num_output_tokens() if detokenizer else 0)
        generated = int(stats.num_generation_tokens)
        decode = stats.last_token_ts - stats.first_token_ts
        return WorkFigures(
            prompt,
            generated,
            stats.scheduled_ts - stats.queued_ts if stats.scheduled_ts else None,
            stats.arrival_time + stats.first_token_latency if generated else None,
            decode / (generated - 1) if generated > 1 else None,
        )


def continued_trace(options: dict[str, Any]) -> dict[str, Any]:
    """Put the engine's span below ours, whatever vLLM's handler took from the client's headers."""
    record = current_record()
    if record is None or record.trace_headers is None:
        return options
    return {**options, "trace_headers": dict(record.trace_headers)}  # it is serialised


def report_work(processor: Any) -> None:
    """Give the record of each request what vLLM's output processor knows of its sequences.

    Called where a sequence is added, which is in the request's own context on both lanes.
    """
    add = processor.add_request

    def add_request(
        request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        add(request, prompt, parent_req, request_index, queue)
        record = current_record()
        state = processor.request_states.get(request.request_id)
        if record is not None and state is not None:
            # The sequences of one prompt (`n`) share it.
            record.work.append(SequenceWork(state, has_prompt=request_index == 0))

    processor.add_request = add_request
