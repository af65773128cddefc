"""The options of a turn: a session's parameters by origin (its graph, the session, its turn), the
adapters that they choose, and those of an interrupted turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...backends import EmbedSpec, Rendering, SamplingParams
from ...backends.answer_form import AnswerForm
from ...backends.errors import InvalidArgument, error_from_wire
from ...backends.model_spec import adapter_key, split_key
from ...backends.params import (
    BY_NAME,
    KEYS_MAX,
    PARAMETERS,
    REASONING_BOUNDS,
    Options,
    OverflowPolicy,
    adjust_parameters,
    check_turn_level,
    differing_values,
    leave_out_unknown_biases,
    nearest,
    overflow_beside,
    read_options,
    reasoning_budget,
    sampling_params,
    stopping_params,
    tool_choice_of,
)
from ...backends.tool_formats import named_form
from ...scheduler import PRIORITIES
from ...scheduler import messages as m
from ...scheduler.messages import AdapterReport, ReasoningSpec, TaskSpec
from ...scheduler.owner import Priority
from ..answers.calls import ANSWER_CALLS_MAX, NO_TOOLS, ToolUse
from ..answers.constraint import AUTO, NO_CALLS, constraint_of
from ..entries import Replay
from ..history.overflow import ContextLimit
from ..memory import MemoryMeter
from ..worker_client import NameCeilings, TextClient, WorkerClient

NO_SAMPLING = SamplingParams()
"""Placeholder in a spec until `Parameters.fill`."""
NO_OPTIONS: Mapping[str, Any] = {}
NO_TEMPLATE = dict.fromkeys(("tools", "tool-choice"), "raw text has no tools: send messages")
CHAT_TEMPLATE, SPECULATION = "chat-template", "speculation"
SESSION, TURN, BUILTIN, GRAPH = "session", "turn", "built-in", "graph"


class TurnNotes(msgspec.Struct, frozen=True):
    """Keys of a turn's JSON that were ignored, and why values of it were replaced."""

    ignored: list[str] = []
    out_of_range: dict[str, str] = {}


NO_NOTES = TurnNotes()
TurnParameters = tuple[dict[str, Any], int, dict[str, str], TurnNotes]
"""The options of a turn, its seed, its adjusted values, and the notes on its JSON."""


class Effective(msgspec.Struct, frozen=True):
    """A parameter's value in force, its origin, and why it differs from the requested value."""

    name: str
    value: Any
    origin: str
    adjusted: str = ""


class TurnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A call's options for its turn; empty fields leave the choice to the session."""

    options: dict[str, Any] = {}
    notes: TurnNotes = NO_NOTES
    """The notes on *options* that were read from JSON."""
    priority: Priority | None = None
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    credit: int = -1
    special: bool = True
    pull: bool = False
    scores_prompt: bool = True
    """The turn returns the logprobs of its prompt, if the parameters request them."""
    embeds: bool = False
    """The caller accepts an embedding, if the parameters request one."""
    shared_tokens: int = 0
    """The first tokens of a text to embed that other texts may have too."""
    watch: bool = False
    """Report changes of the position in the queue."""
    watch_prompt: bool = False
    """Report the progress of the prompt."""
    quota_checked: bool = False
    """The token quota was checked already, for the first turn of the same call."""


class Parameters:
    """The parameters of a session, which owns them. `defaults` are its graph's, with their
    `origins`; `options` are the session's. `ignored` and `not_applied` were requested and do not
    apply. `adjusted` has the reasons why values of the last turn differ from those requested,
    `out_of_range` those of values that were set as JSON. `seed` is that of the last turn.
    """

    def __init__(self, defaults: Mapping[str, Any], origins: Mapping[str, str] | None = None):
        self.defaults = dict(defaults)
        self.origins = dict(origins or {})
        self.options: dict[str, Any] = {}
        self.ignored: list[str] = []
        self.not_applied: dict[str, Any] = {}
        self.adjusted: dict[str, str] = {}
        self.out_of_range: dict[str, str] = {}
        self.seed = 0
        self.unused: Mapping[str, str] = {}
        """Parameters without effect on the present input's turn, with the reasons."""
        self._turn: dict[str, Any] = {}
        self._turn_notes = NO_NOTES
        self._meter = MemoryMeter()
        self._read: tuple[Mapping[str, Any], dict[str, Any]] = (NO_OPTIONS, {})
        """The options that were read last, and their values: a turn needs them several times."""

    @property
    def kept_bytes(self) -> int:
        maps = (self.defaults, self.origins, self.options, self._turn)
        notes = {"ignored": self.reported_ignored, "adjusted": self.adjusted}
        return self._meter.count_bytes(*maps, self.not_applied, notes, self.out_of_range)

    @property
    def reported(self) -> dict[str, str]:
        """Why values differ from those requested, by name: of the last turn, and set since then."""
        return self.out_of_range | self.adjusted

    @property
    def reported_ignored(self) -> list[str]:
        """The keys that were ignored, in the last turn's own JSON, too."""
        return sorted({*self.ignored, *self._turn_notes.ignored})[:KEYS_MAX]

    @property
    def of_turn(self) -> TurnParameters:
        return self._turn, self.seed, self.adjusted, self._turn_notes

    @of_turn.setter
    def of_turn(self, values: TurnParameters) -> None:
        self._turn, self.seed, self.adjusted, self._turn_notes = values

    def copy(self) -> Parameters:
        new = Parameters(self.defaults, self.origins)
        new.options, new.ignored = dict(self.options), list(self.ignored)
        new.not_applied, new.unused = dict(self.not_applied), self.unused
        new.out_of_range = dict(self.out_of_range)
        return new

    def apply(self, options: Options) -> None:
        """Apply parameters that were read; note those that do not apply.

        :raises InvalidArgument: they contradict the others.
        """
        model = options.level("model")
        new = {k: v for k, v in options.values.items() if k not in model}
        own = self.options | new | overflow_beside(self.defaults | self.options, new)
        if "ctx-size" in model:
            own |= self._smaller_context(model.pop("ctx-size"))
        most = self.defaults.get("batch-size") or BY_NAME["batch-size"].default
        if "batch-size" in model and model["batch-size"] <= most:
            own["batch-size"] = model.pop("batch-size")
            self.not_applied.pop("batch-size", None)
        adjust_parameters(self.defaults | own | self._turn)
        self.options = own
        kept = {n: why for n, why in self.out_of_range.items() if n not in options.values}
        self.out_of_range = kept | options.adjusted
        kept = {n: value for n, value in self.not_applied.items() if n not in model}
        self.not_applied = kept | differing_values(model, self.defaults)
        self.ignored = sorted({*self.ignored, *options.ignored})[:KEYS_MAX]

    def _smaller_context(self, size: int) -> dict[str, Any]:
        """Return the option for a context of *size* tokens. If *size* is 0 or larger than the
        graph's size, it is the graph's.
        """
        most = self.defaults.get("ctx-size", 0)
        self.not_applied.pop("ctx-size", None)
        if most and size > most:
            self.not_applied["ctx-size"] = most
        return {"ctx-size": min(size or most, most) if most else size}

    def set_turn_options(self, options: Mapping[str, Any], notes: TurnNotes = NO_NOTES) -> None:
        """Apply *options* to the next turn, and choose its seed. *notes* are on their JSON.

        :raises InvalidArgument: a key is unknown, or a value is out of its range or contradicts
            another one.
        """
        turn = self._read_turn(options)
        check_turn_level(turn)
        adjust_parameters(self.defaults | self.options | turn)
        self._turn, self._turn_notes = turn, notes
        seed = self.get("seed")
        self.seed = secrets.randbits(32) if seed == -1 else seed

    def get(self, name: str) -> Any:
        """Return a parameter's requested value, or its default."""
        return next(self._requests(name))[0]

    def standing(self, name: str) -> Any:
        """Return a parameter's value between turns."""
        values = self.defaults | self.options
        return values.get(name, BY_NAME[name].default)

    def in_turn(self, name: str, options: Mapping[str, Any]) -> Any:
        """Return a parameter's value in a turn with *options*.

        :raises InvalidArgument: an option is unknown, or its value out of its range.
        """
        return self._read_turn(options).get(name, self.standing(name))

    def _read_turn(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if options is not self._read[0]:
            values = read_options(options, strict=True).values
            values |= overflow_beside(self.defaults | self.options, values)
            self._read = options, values
        return self._read[1]

    def context_limit(
        self, options: Mapping[str, Any], ctx_size: int, *, chat: bool
    ) -> ContextLimit:
        """Return the limit of the history of a turn with *options*, on a model with contexts of
        *ctx_size* tokens. With *chat* the history consists of messages. A history whose embedding
        is to be computed is not shortened.

        :raises InvalidArgument: an option is unknown, or its value out of its range.
        """
        values = self.defaults | self.options | self._read_turn(options)

        def value_of(name: str) -> Any:
            return values.get(name, BY_NAME[name].default)

        policy = OverflowPolicy(value_of("overflow"))
        drops_input = policy is OverflowPolicy.DROP_TURNS
        if value_of("embedding"):
            policy = OverflowPolicy.ERROR
        elif policy is OverflowPolicy.AUTO and value_of("ctx-shift"):
            policy = OverflowPolicy.SHIFT
        elif policy is OverflowPolicy.AUTO:
            policy = OverflowPolicy.DROP_TURNS if chat else OverflowPolicy.ERROR
        return ContextLimit(
            policy=policy,
            ctx_size=min(value_of("ctx-size") or ctx_size, ctx_size),
            n_predict=value_of("n-predict"),
            n_keep=value_of("n-keep"),
            n_discard=value_of("n-discard"),
            drops_input=drops_input,
        )

    def rendering(self, options: Mapping[str, Any]) -> Rendering:
        """Return the chat template's arguments for a turn with *options*.

        :raises InvalidArgument: an option is unknown, or its value out of its range.
        """
        tools, effort = (self.in_turn(name, options) for name in ("tools", "reasoning-effort"))
        arguments = self.in_turn("chat-template-kwargs", options)
        return Rendering(tools=tools, arguments=effort_arguments(effort) | arguments)

    def with_system_prompt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the first *messages* of a chat, with the system prompt of the parameters before
        them if they have none.
        """
        return with_system_prompt(self.standing("system-prompt"), messages)

    def bound_answer(self, spec: TaskSpec, ceilings: NameCeilings) -> TaskSpec:
        """Return *spec* with at most as many tokens of the answer as the *ceilings* allow."""
        limit = ceilings.n_predict_max
        if limit is None or spec.embed is not None or 0 <= spec.n_predict <= limit:
            return spec
        if spec.n_predict > limit:
            setting = f"{ceilings.setting}.n-predict-max"
            self.adjusted["n-predict"] = f"{setting} allows {limit} tokens of an answer"
        return msgspec.structs.replace(spec, n_predict=limit)

    def tool_use(self, options: Mapping[str, Any], form: AnswerForm) -> ToolUse:
        """Return the form of the answer of a turn with *options*, of a model that writes answers in
        *form*, and the tool calls that it may have.
        """
        choice = tool_choice_of(self.in_turn("tool-choice", options))
        if not self.in_turn("tools", options) or choice.mode == NO_CALLS:
            return msgspec.structs.replace(NO_TOOLS, form=form)
        if not form.calls and choice.mode != AUTO:
            form = msgspec.structs.replace(form, name="json", calls=named_form("json").calls)
        parallel = self.in_turn("parallel-tool-calls", options)
        calls_max = ANSWER_CALLS_MAX if parallel else 1
        return ToolUse(form=form, calls_max=calls_max, names=choice.names)

    def constrain_calls(self, spec: TaskSpec, use: ToolUse, *, opened: str) -> TaskSpec:
        """Return *spec* with the grammar of the tool calls that its answer may have or must have.
        *opened* is the mark of the answer with which the prompt ends.

        :raises InvalidArgument: no grammar can be made of the tools.
        """
        if not use.allows_calls or spec.sampling.has_grammar or spec.embed is not None:
            return spec
        choice, parallel = tool_choice_of(self.get("tool-choice")), use.calls_max > 1
        tools = self.get("tools")
        arguments = effort_arguments(self.get("reasoning-effort"))
        arguments |= self.get("chat-template-kwargs")
        thinks = arguments.get("enable_thinking") is not False
        fields = constraint_of(
            *(use.answers, tools, choice), parallel=parallel, opened=opened, thinks=thinks
        )
        if not fields:
            return spec
        sampling = msgspec.structs.replace(spec.sampling, **fields, ignore_eos=False)
        return msgspec.structs.replace(spec, sampling=sampling, ctx_shift=False)

    def bound_reasoning(
        self, spec: TaskSpec, use: ToolUse, *, opened: str, ceiling: tuple[str, int] | None = None
    ) -> TaskSpec:
        """Return *spec* with the marks of the reasoning in its answer and with its bound, which is
        at most that of the *ceiling*, a setting's name and its number. *opened* is the mark of the
        answer with which the prompt ends. If the answer begins with reasoning that has a budget or
        is split off, a grammar of the whole answer begins behind that.
        """
        form, sampling = use.answers, spec.sampling
        blocks = tuple(block for block in form.reasoning if block.end.strip())
        if not blocks or spec.embed is not None:
            return spec
        begins = [block.begin.strip() for block in blocks]
        budget = reasoning_budget({name: self.get(name) for name in REASONING_BOUNDS})
        apart = budget >= 0 or self.get("reasoning-format") != "none"
        if ceiling is not None:
            name, limit = ceiling
            if budget > limit:
                self.adjusted["reasoning-budget"] = f"{name} allows {limit} tokens of a thought"
            budget = min(budget, limit) if budget >= 0 else limit
        reasons_first = "" in begins or opened.strip() in begins
        bound = ReasoningSpec(
            blocks=blocks,
            opened=opened,
            contents=tuple(b.begin for b in form.content if b.anywhere and b.begin.strip()),
            calls=tuple(t for c in form.calls if use.allows_calls for t in c.triggers),
            budget=budget,
            message=self.get("reasoning-budget-message"),
            rests_grammar=sampling.has_grammar
            and not sampling.grammar_triggers
            and apart
            and reasons_first,
        )
        return msgspec.structs.replace(spec, reasoning=bound)

    def _requests(self, name: str) -> Iterator[tuple[Any, str]]:
        if name in self._turn:
            yield self._turn[name], TURN
        if name in self.options:
            yield self.options[name], SESSION
        if self.defaults.get(name) is not None:
            yield self.defaults[name], self.origins.get(name, GRAPH)
        yield BY_NAME[name].default, BUILTIN

    def effective(self) -> list[Effective]:
        """Return all parameters with their values in force and their origins: the present or last
        turn, the session, its graph, the model's configuration, `init_backend`, the file, or the
        built-in default.
        """
        requested = {p.name: next(self._requests(p.name)) for p in PARAMETERS}
        values, adjusted = self._adjust()
        return [
            Effective(n, values.get(n, value), origin, adjusted.get(n, ""))
            for n, (value, origin) in requested.items()
        ]

    def _adjust(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the values in force, and the reasons where they differ from those requested."""
        values, adjusted = adjust_parameters(self.defaults | self.options | self._turn)
        given = {n for n, value in values.items() if value and value != BY_NAME[n].default}
        before = {n: why for n, why in self.out_of_range.items() if n not in self._turn}
        given.add(CHAT_TEMPLATE)  # the note on it comes from the input, whatever was requested
        given.add(f"{SPECULATION}={values.get(SPECULATION)}")
        unused = {n.partition("=")[0]: why for n, why in self.unused.items() if n in given}
        return values, before | adjusted | unused | self._turn_notes.out_of_range

    def fill(self, spec: TaskSpec, vocab_size: int) -> TaskSpec:
        """Return *spec* with the parameters in force, for a model with that vocabulary."""
        values, self.adjusted = self._adjust()
        self.adjusted |= leave_out_unknown_biases(values, vocab_size)
        embed = None
        if values.get("embedding"):
            embed = EmbedSpec(values.get("pooling", ""), values.get("embd-normalize", 2))
        if values.get("seed", -1) != -1:
            self.seed = values["seed"]
        return msgspec.structs.replace(
            spec,
            sampling=sampling_params(values, self.seed),
            n_predict=0 if embed is not None else values.get("n-predict", -1),
            ctx_size=values.get("ctx-size", 0),
            batch_size=values.get("batch-size", 0),
            stop=tuple(values.get("stop", ())),
            reverse_prompt=tuple(values.get("reverse-prompt", ())),
            stopping=stopping_params(values),
            ctx_shift=values.get("ctx-shift", False),
            n_keep=values.get("n-keep", 0),
            n_discard=values.get("n-discard", 0),
            cache_reuse=values.get("cache-reuse", 0),
            speculation=values.get("speculation", "auto"),
            prediction=values.get("prediction", ""),
            draft_max=values.get("draft-max", BY_NAME["draft-max"].default),
            prompt_logprobs=None if embed is not None else values.get("prompt-logprobs"),
            embed=embed,
        )


def effort_arguments(effort: str) -> dict[str, Any]:
    """Return the arguments of the chat template for a level of reasoning."""
    if not effort:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def rendering_of(client: TextClient | WorkerClient, name: str, rendering: Rendering) -> Rendering:
    """Return *rendering* by the template of a model's *name*, if that has its own one."""
    template = name if name in client.info.templates else ""
    return msgspec.structs.replace(rendering, template=template)


SYSTEM_ROLES = ("system", "developer")


def with_system_prompt(text: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first *messages* of a chat, after a system message with *text*, unless that is
    empty or they have such a message.
    """
    if not text or any(message.get("role") in SYSTEM_ROLES for message in messages):
        return list(messages)
    return [{"role": SYSTEM_ROLES[0], "content": text}, *messages]


PROMPT_LOGPROBS_MAX = 1 << 15
"""Logprobs of a prompt's tokens and of their top tokens, which are described in one reply."""
_NAME_SHOWN_MAX = 100
Reports = Mapping[str, AdapterReport]
"""A model's adapters by their names, in the order of the configuration."""


def check_prompt_logprobs(spec: m.TaskSpec) -> None:
    """Check the number of logprobs that a turn is to return of its prompt.

    :raises InvalidArgument: there are too many.
    """
    size, top = m.count_tokens(spec.tokens), spec.prompt_logprobs
    if top is None or size * (1 + top) <= PROMPT_LOGPROBS_MAX:
        return
    raise InvalidArgument(
        f"prompt-logprobs: {size} tokens with {top} top tokens each make {size * (1 + top)}"
        f" logprobs; at most {PROMPT_LOGPROBS_MAX} are returned",
        hint="request fewer top tokens, or use a shorter prompt",
        data={"prompt_tokens": size, "prompt_logprobs_max": PROMPT_LOGPROBS_MAX},
    )


def resumed(
    before: Replay | None, call: TurnOptions, tokens: Sequence[int], text: bytes, vocab_size: int
) -> tuple[Replay, TurnOptions]:
    """Return the interrupted turn *before*, extended by the *tokens* and the *text* that its reader
    has, and the options to continue with: the turn's own, with its seed. *call* decides the
    timeouts and the delivery, and may change the priority.

    :raises InvalidArgument: no turn was interrupted, or the reader's output differs.
    """
    if before is None or before.ended:
        raise InvalidArgument("no turn of this session was interrupted")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidArgument(f"the tokens are 0 … {vocab_size - 1}")
    so_far, begin = before.extended(tokens, text), before.begin
    options = msgspec.structs.replace(
        call,
        options={**begin.options, "seed": begin.seed},
        priority=PRIORITIES[begin.priority] if call.priority is None else call.priority,
        special=begin.special,
    )
    return so_far, options


def chosen_keys(reports: Reports, lora: Sequence[Sequence[Any]] | None) -> tuple[str, ...]:
    """Return the sorted keys of a turn's adapters, without those at a scale of 0.

    *lora* are pairs of a name, or an index in the order of the configuration, and a scale; None
    means the configured scales of the model's adapters.

    :raises InvalidArgument: the model has no such adapter.
    :raises InferdError: an adapter is not loaded; this is its own error, mostly `LoadFailed`.
    """
    if lora is None:
        pairs = [(report, report.spec.scale) for report in reports.values()]
    else:
        pairs = [(_find(reports, which), scale) for which, scale in lora]
    scales: dict[str, float] = {}
    for report, scale in pairs:
        if not scale:
            continue
        if report.info is None:
            raise error_from_wire(report.error or {})
        scales[report.info.id] = scales.get(report.info.id, 0.0) + scale
    return tuple(sorted(adapter_key(i, scale) for i, scale in scales.items() if scale))


def _find(reports: Reports, which: str | int) -> AdapterReport:
    if isinstance(which, int) and 0 <= which < len(reports):
        return list(reports.values())[which]
    if isinstance(which, str) and which in reports:
        return reports[which]
    names = ", ".join(reports) or "none"
    close = nearest(which, reports) if isinstance(which, str) else ""
    shown = which if isinstance(which, int) else which[:_NAME_SHOWN_MAX]
    raise InvalidArgument(
        f"the model has no adapter {shown!r}",
        hint=f"{close + ' ' if close else ''}it has {names}; an operator adds one with"
        " `inferd add-adapter`",
        data={"adapters": list(reports)},
    )


def scales_by_name(reports: Reports, keys: Iterable[str]) -> dict[str, float]:
    """Return the scales of *keys* by the adapters' names, or by their ids if a name was removed."""
    names = {report.info.id: name for name, report in reports.items() if report.info is not None}
    pairs = [split_key(key) for key in keys]
    return {names.get(adapter_id, adapter_id): scale for adapter_id, scale in pairs}
