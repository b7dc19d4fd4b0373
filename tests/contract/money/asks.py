"""What the users of a schedule ask: a fake script, and the output the run wants."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from threadloom.conversation.v1.conversation_service_pb2 import RunRequest
from threadloom.conversation.v1.message_pb2 import ContentPart
from threadloom.conversation.v1.run_pb2 import RunOptions


@dataclass(frozen=True)
class Ask:
    """A message. `gate_at`: its answer waits there until the schedule opens its gate."""

    script: dict[str, Any]
    gate_at: int | None
    most: int | None
    least: int | None

    @property
    def hangs(self) -> bool:
        """Whether its answer may never come by itself."""
        return "hang" in self.script

    def request(self, thread: str, name: str, key: str) -> RunRequest:
        """The request. `name` is its gate's and its failures'; no other ask has it."""
        script = {**self.script, "key": name} | (
            {} if self.gate_at is None else {"gate": name, "gate_at": self.gate_at}
        )
        words = " ".join(f"{key}={value}" for key, value in script.items())
        options = RunOptions()
        if self.most is not None:
            options.max_output_tokens = self.most
        if self.least is not None:
            options.min_output_tokens = self.least
        return RunRequest(
            thread_id=thread, parts=[ContentPart(text=f"[fake {words}]")], options=options, request_id=key
        )


# A fault of the first attempts only, or (0) of every one.
TIMES = st.sampled_from([1, 1, 2, 0])
PLACES = st.sampled_from([0, 0, 1, 4])  # nothing was shown at 0: the call is made again
FAULTS = st.one_of(
    st.just({}),
    st.just({}),
    st.fixed_dictionaries({"error": st.sampled_from([429, 500, 400]), "times": TIMES}),
    st.fixed_dictionaries({"close": PLACES, "times": TIMES}),
    st.fixed_dictionaries({"cut": PLACES, "times": TIMES}),
    st.fixed_dictionaries({"error_at": PLACES, "times": TIMES}),
    st.fixed_dictionaries({"hang": st.integers(-1, 4), "times": st.sampled_from([1, 0])}),
)
ANSWERS = st.fixed_dictionaries(
    {"chunks": st.sampled_from([1, 3, 8, 40])},
    optional={
        "reasoning": st.integers(1, 4),
        "cached_tokens": st.integers(1, 12),
        "usage": st.just("never"),
        "unlimited": st.just(1),
    },
)
LEAST = {most: st.one_of(st.none(), st.integers(1, most), st.just(most)) for most in (3, 10, 25, 60)}
MOST = st.sampled_from(list(LEAST))
ASKS = st.builds(
    lambda answer, fault, gate_at, wish: Ask(answer | fault, gate_at, *wish),
    ANSWERS,
    FAULTS,
    st.one_of(st.none(), st.integers(0, 6)),
    # Without a wish a small limit refuses the run: the deployment's own would be 16,384 tokens.
    st.one_of(MOST.flatmap(lambda most: st.tuples(st.just(most), LEAST[most])), st.just((None, None))),
)
