"""The rules that the wrong servers break, each as a change of messages."""

from __future__ import annotations

import math
from typing import Any

from tests.gateways.conformance.wrong_server import Fault, Link, Message, maps_in

HELLO, REQUEST, RESULT, ERROR, EVENT, CREDIT, GOODBYE, COPY = range(8)
INVALID = {"name": "InvalidArgument", "number": 1, "message": "no", "hint": "", "data": {}}


class ErrorsBecomeResults(Fault):
    """Refusals are answered as successes."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        return [[RESULT, message[1], {}]] if message[0] == ERROR else [message]


class OtherNumbers(Fault):
    """Errors have other numbers than their names."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] in (ERROR, GOODBYE):
            message[-1]["number"] += 1000
        return [message]


class ErrorsAreGeneral(Fault):
    """All errors are RuntimeError."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] in (ERROR, GOODBYE):
            message[-1] |= {"name": "RuntimeError", "number": 5}
        return [message]


class ErrorsEndConnections(Fault):
    """The connection is closed after an error reply."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] != ERROR:
            return [message]
        link.to_client(message)
        link.hang_up()
        return []


class ChangesComeLate(Fault):
    """The changes of sessions come after the replies that acknowledge them."""

    def __init__(self) -> None:
        self._late: dict[Link, list[Message]] = {}

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] == COPY:
            self._late.setdefault(link, []).append(message)
            return []
        return [message, *self._late.pop(link, ())]


class NoData(Fault):
    """Errors have no data."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] in (ERROR, GOODBYE):
            message[-1].pop("data", None)
        return [message]


class NoGoodbyes(Fault):
    """Connections end without a goodbye."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        return [] if message[0] == GOODBYE else [message]


class NoErrors(Fault):
    """Neither errors nor goodbyes are sent."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        return [] if message[0] in (ERROR, GOODBYE) else [message]


class OtherTexts(Fault):
    """Texts are others than the model's."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        for part in maps_in(message[2:]):
            for key in ("text", "data", "piece"):
                if isinstance(part.get(key), bytes):
                    part[key] = part[key][::-1] + b"!"
                elif isinstance(part.get(key), str):
                    part[key] += "!"
        return [message]


class OtherResults(Fault):
    """Results are empty."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        return [[RESULT, message[1], {}]] if message[0] == RESULT else [message]


class NoLimits(Fault):
    """The hello has no limits."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] == HELLO:
            message[1]["limits"] = {}
        return [message]


class LateHello(Fault):
    """The server's hello waits for the client's."""

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] == HELLO and "hello" in link.notes:
            link.to_client(link.notes["hello"])
        return [message]

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] != HELLO:
            return [message]
        link.notes["hello"] = message
        return []


class UnknownFieldsRefused(Fault):
    """Requests and hellos with fields of a later version are refused."""

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] == HELLO and {"colour", "limits"} & set(message[1]):
            link.to_client([GOODBYE, INVALID])
            link.hang_up()
            return []
        if message[0] != REQUEST:
            return [message]
        params = message[3] if len(message) > 3 and isinstance(message[3], dict) else {}
        if {"colour", "pad", "later"} & set(params) or len(message) > 4:
            link.to_client([ERROR, message[1], INVALID])
            return []
        return [message]


class OtherVersionsRefused(Fault):
    """A client of another minor version is refused."""

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] == HELLO and message[1].get("protocol") not in ([1, 1], None):
            link.to_client([GOODBYE, INVALID])
            link.hang_up()
            return []
        return [message]


class WrongInstance(Fault):
    """Handles are not of the daemon's start."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] == HELLO:
            message[1]["instance"] += 1
        return [message]


class HandlesAreReused(Fault):
    """Every context has the handle of the connection's first one."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] == RESULT and "context" in message[2]:
            message[2]["context"] = link.notes.setdefault("context", message[2]["context"])
        return [message]


class NoCancellation(Fault):
    """`cancel`, `park` and `end_reasoning` are answered without an effect."""

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] == REQUEST and message[2] in ("cancel", "park", "end_reasoning"):
            link.to_client([RESULT, message[1], {"cancelled": False, "parked": 0, "ended": 0}])
            return []
        return [message]


class AlwaysCancelled(Fault):
    """`cancel` always reports a success."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] == RESULT and "cancelled" in message[2]:
            message[2]["cancelled"] = True
        return [message]


class ConnectionsOutlive(Fault):
    """Graphs, contexts and turns outlive their connection."""

    held_s = math.inf


class RepliesInOrder(Fault):
    """A reply waits for those of earlier requests."""

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] == REQUEST:
            link.notes.setdefault("order", []).append(message[1])
        return [message]

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] not in (RESULT, ERROR):
            return [message]
        order, ready = link.notes["order"], link.notes.setdefault("ready", {})
        ready[message[1]] = message
        passed = []
        while order and order[0] in ready:
            passed.append(ready.pop(order.pop(0)))
        return passed


class EventsAfterReplies(Fault):
    """A request has an event after its reply."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] in (RESULT, ERROR):
            return [message, [EVENT, message[1], {}]]
        return [message]


class CreditIsIgnored(Fault):
    """Streams do not wait for credit."""

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] == REQUEST and message[2] == "stream":
            return [message, [CREDIT, message[1], 1000]]
        return [message]


class CreditIsLost(Fault):
    """Frames of credit have no effect."""

    def request(self, link: Link, message: Message) -> list[Message]:
        return [] if message[0] == CREDIT else [message]


class NoOffsets(Fault):
    """All events have the offset 0."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] == EVENT:
            message[2].pop("offset", None)
        return [message]


class NoEvents(Fault):
    """Streams have no events."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        return [] if message[0] == EVENT else [message]


class CutCharacters(Fault):
    """The last byte of a text comes with the next text."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] not in (EVENT, RESULT):
            return [message]
        for key in ("text", "piece"):
            text = message[2].get(key)
            if isinstance(text, bytes):
                whole = link.notes.pop(key, b"") + text
                cut = len(whole) - 1 if len(text) > 1 else len(whole)
                message[2][key], link.notes[key] = whole[:cut], whole[cut:]
        return [message]


class LabelsAreIgnored(Fault):
    """Labels have no meaning."""

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] == HELLO:
            message[1].pop("label", None)
        return [message]


class DescriptorsAreLost(Fault):
    """Descriptors are not passed on."""

    def fds(self, fds: list[int]) -> list[int]:
        return []


class DescriptorsAreExchanged(Fault):
    """Descriptors are taken in the reverse order."""

    def fds(self, fds: list[int]) -> list[int]:
        return fds[::-1]


class Without(Fault):
    """Fields of requests have no effect."""

    def __init__(self, *fields: str):
        self._fields = fields

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] == REQUEST and isinstance(message[3], dict):
            kept = {k: v for k, v in message[3].items() if k not in self._fields}
            return [[*message[:3], kept, *message[4:]]]
        return [message]


class WithoutCall(Fault):
    """Calls succeed without an effect."""

    def __init__(self, *calls: str):
        self._calls = calls

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] == REQUEST and message[2] in self._calls:
            link.to_client([RESULT, message[1], {}])
            return []
        return [message]


class Changed(Fault):
    """Fields of results have other values."""

    def __init__(self, **values: Any):
        self._values = values

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] in (RESULT, EVENT):
            for part in maps_in(message[2:]):
                part |= {key: self._values[key] for key in self._values if key in part}
        return [message]


class OneFrameAtATime(Fault):
    """A request that arrives before the reply to the previous one is lost."""

    def request(self, link: Link, message: Message) -> list[Message]:
        if message[0] != REQUEST:
            return [message]
        if link.notes.get("busy"):
            return []
        link.notes["busy"] = True
        return [message]

    def answer(self, link: Link, message: Message) -> list[Message]:
        link.notes["busy"] = False
        return [message]


class OneTurn(Fault):
    """A request on a context with a running turn is answered as a success."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] == ERROR and message[2]["name"] == "SessionBusy":
            return [[RESULT, message[1], {}]]
        return [message]


class NoReplies(Fault):
    """Requests get no reply."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        return [] if message[0] == RESULT else [message]


class IdsAreChanged(Fault):
    """Replies have other ids than their requests."""

    def answer(self, link: Link, message: Message) -> list[Message]:
        if message[0] in (RESULT, ERROR, EVENT):
            message[1] = (message[1] + 1) & 0xFFFF
        return [message]


WRONG_SERVERS: tuple[tuple[Fault, str], ...] = (
    (
        ErrorsBecomeResults(),
        """
        cancellation.an_unknown_context_cannot_be_cancelled
        compatibility.an_unknown_call_is_refused compatibility.parameters_for_images_are_refused
        compatibility.unknown_parameters_are_refused_if_the_json_is_strict
        contexts.a_copy_becomes_the_session contexts.an_imported_file_needs_its_hash
        contexts.a_query_without_a_descriptor_adds_nothing
        contexts.a_session_is_deleted_before_the_reply
        contexts.a_session_is_changed_and_restored_by_its_id contexts.reset_clears_the_history
        contexts.a_session_is_open_on_one_connection contexts.rewind_removes_turns
        errors.ContextFull errors.EndOfSequence errors.InvalidArgument errors.InvalidEncoding
        errors.KvFull errors.LoadFailed errors.MissingMemory errors.ModelNotFound errors.NotFound
        errors.PermissionDenied errors.PromptTooLong errors.RuntimeError errors.TooLarge
        errors.UnsupportedOperation errors.WorkerCrashed errors.Busy
        frames.another_mistake_leaves_the_connection_open
        frames.arrays_and_maps_may_be_as_deep_as_the_limit
        frames.nil_stands_only_where_the_page_allows_it handles.a_graph_is_not_a_context
        handles.a_handle_is_valid_on_its_own_connection_only
        handles.a_handle_that_never_existed_is_refused handles.closing_a_context_twice_is_refused
        handles.outputs_outlive_their_lease limits.answers_of_a_call limits.branches_of_a_fork
        limits.a_reply_above_its_limit limits.characters_of_a_session_id
        limits.characters_of_a_traceparent limits.graphs_of_a_connection limits.messages_of_a_chat
        limits.parameters_of_a_request limits.seconds_of_a_timeout limits.texts_of_an_embed
        limits.documents_of_a_rerank turns.only_reranking_models_rank_documents
        turns.texts_that_are_too_long_are_refused_or_truncated
        limits.the_name_in_a_builder limits.tokens_of_a_detokenize
        limits.tool_calls_of_a_message limits.values_of_a_request
        exchanges.images_that_are_refused exchanges.documents_that_are_not_ranked
        media.a_part_of_another_shape_is_refused media.an_image_in_a_descriptor_must_be_a_file
        media.an_image_needs_a_model_that_reads_it media.another_content_is_refused_with_its_item
        media.images_of_a_request_are_bounded
        streams.a_credit_outside_its_range_is_refused streams.a_refused_turn_leaves_no_trace
        tensors.a_descriptor_of_another_kind_is_refused tensors.a_tensor_above_the_limit_is_refused
        tensors.a_descriptor_that_was_not_sent_is_missed
        tensors.an_unknown_name_of_a_type_is_refused tensors.tensors_may_be_as_many_as_the_limit
        turns.a_buffer_that_is_too_small_loses_nothing turns.a_span_of_another_form_is_refused
        turns.a_turn_needs_an_input turns.the_model_is_listed turns.there_are_two_outputs
        """,
    ),
    (OtherNumbers(), "errors.[A-BD-Z]* malformed.a_[fghp]*"),
    (ErrorsAreGeneral(), "errors.T* errors.M*"),
    (ErrorsEndConnections(), "frames.another_mistake_leaves_the_connection_open"),
    (
        NoData(),
        """
        cancellation.a_request_is_cancelled_by_its_id
        cancellation.a_turn_that_lasts_too_long_is_ended
        compatibility.another_major_version_is_refused errors.ModelNotFound
        turns.tokens_are_pulled_one_by_one
        """,
    ),
    (
        NoGoodbyes(),
        """
        errors.ProtocolError errors.QuotaExceeded errors.VersionMismatch
        frames.a_longer_frame_ends_the_connection frames.an_id_in_use_ends_the_connection
        greeting.a_goodbye_is_the_last_message greeting.a_label_of_other_characters_is_refused
        greeting.a_name_on_behalf_of_nobody_is_refused
        limits.descriptors_that_no_request_has_taken limits.items_of_a_message
        """,
    ),
    (
        OtherTexts(),
        """
        cancellation.a_parked_turn_continues compatibility.a_parameter_that_is_nil_counts_as_absent
        compatibility.keys_may_be_spelt_with_underscores
        compatibility.unknown_parameters_in_json_are_reported
        contexts.an_input_replaces_the_history_unless_it_is_appended
        contexts.options_hold_for_later_turns exchanges.a_prompt_in_a_descriptor exchanges.compute
        exchanges.compute_single exchanges.compute_with_named_tensors exchanges.stream
        frames.a_client_that_stops_sending_gets_its_replies
        frames.fields_with_their_defaults_may_be_given streams.a_chat_has_no_events
        streams.events_come_before_the_reply tensors.a_hundred_tensors_come_back
        tensors.a_named_tensor_may_hold_parameters tensors.any_bytes_of_text_come_back
        tensors.every_index_but_one_is_the_prompt turns.a_stop_text_ends_the_turn
        turns.a_turn_without_new_input_computes_the_same_prompt turns.answers_are_several
        turns.fini_single_discards_the_output turns.prompt_compute_appends_to_the_history
        turns.run_inference_removes_zero_bytes turns.the_echo_model_answers_with_its_prompt
        turns.tokens_become_their_text_again
        """,
    ),
    (
        OtherResults(),
        """
        compatibility.unknown_fields_of_every_call_are_ignored exchanges.a_place_in_the_queue
        contexts.a_session_id_names_one_context contexts.branches_are_independent
        exchanges.a_tool_call exchanges.a_turn_that_is_resumed exchanges.branches
        exchanges.a_named_state
        exchanges.chat_in_a_session_with_an_id exchanges.embeddings
        frames.an_int_is_accepted_as_a_float handles.load_accepts_a_name_and_its_builder_form
        media.a_template_counts_the_tokens_of_images media.an_image_is_read_and_kept
        streams.a_full_context_ends_a_stream streams.credit_for_an_unknown_request_is_ignored
        turns.a_chat_takes_messages turns.before_any_turn_the_text_is_empty
        turns.embeddings_are_vectors_of_float32 turns.the_metadata_describes_the_turn
        turns.the_template_renders_messages
        """,
    ),
    (
        NoLimits(),
        "greeting.the_hello_has_every_limit frames.a_frame_of_the_greatest_size_is_read",
    ),
    (
        LateHello(),
        "greeting.the_server_sends_its_hello_first",
    ),
    (
        UnknownFieldsRefused(),
        """
        compatibility.unknown_fields_of_every_call_are_ignored
        compatibility.unknown_items_of_a_message_are_ignored
        greeting.unknown_fields_of_the_hello_are_ignored malformed.an_unknown_field_is_ignored
        malformed.more_items_than_a_request_has_are_ignored
        """,
    ),
    (
        OtherVersionsRefused(),
        """
        compatibility.another_minor_version_is_served malformed.another_minor_version_is_welcome
        """,
    ),
    (WrongInstance(), "handles.handles_carry_the_start_count"),
    (HandlesAreReused(), "handles.handles_are_never_reused"),
    (
        NoCancellation(),
        """
        cancellation.a_request_is_cancelled_by_its_id
        cancellation.a_turn_is_cancelled_by_its_context
        cancellation.another_connection_of_the_user_may_cancel errors.Cancelled
        cancellation.reasoning_ends_on_request
        cancellation.the_output_of_a_cancelled_turn_stays
        """,
    ),
    (AlwaysCancelled(), "cancellation.a_request_that_has_ended_cannot_be_cancelled"),
    (
        ConnectionsOutlive(),
        """
        cancellation.the_end_of_a_connection_cancels_its_requests
        handles.handles_end_with_their_connection
        """,
    ),
    (RepliesInOrder(), "frames.a_slow_request_does_not_hold_up_others"),
    (EventsAfterReplies(), "cancellation.nothing_comes_after_a_cancelled_reply"),
    (
        CreditIsIgnored(),
        """
        streams.a_stream_sends_no_more_events_than_its_credit
        streams.the_default_credit_is_announced
        """,
    ),
    (CreditIsLost(), "streams.a_stream_sends_no_more_events_than_its_credit exchanges.stream"),
    (NoOffsets(), "streams.events_count_their_tokens"),
    (NoEvents(), "streams.the_queue_reports_the_position_of_a_turn"),
    (
        CutCharacters(),
        """
        streams.an_event_never_ends_within_a_character turns.a_piece_never_ends_within_a_character
        """,
    ),
    (LabelsAreIgnored(), "greeting.sessions_belong_to_their_label errors.QuotaExceeded"),
    (
        DescriptorsAreLost(),
        """
        exchanges.a_prompt_in_a_descriptor tensors.a_tensor_may_be_in_a_descriptor
        tensors.descriptors_are_taken_in_their_order
        """,
    ),
    (
        DescriptorsAreExchanged(),
        """
        media.images_take_descriptors_in_their_order tensors.descriptors_are_taken_in_their_order
        """,
    ),
    (Without("timeout_s"), "cancellation.a_turn_that_lasts_too_long_is_ended errors.Timeout"),
    (Without("inputs"), "tensors.no_tensors_give_no_outputs"),
    (Without("config"), "handles.a_second_graph_has_its_own_parameters errors.PromptTooLong"),
    (Without("options"), "streams.text_that_a_stop_may_cut_is_withheld"),
    (Without("size_max"), "turns.a_buffer_that_is_too_small_loses_nothing"),
    (
        Without("keep"),
        "contexts.a_session_keeps_its_history contexts.an_exported_session_is_imported_again",
    ),
    (Without("builders"), "handles.load_accepts_a_name_and_its_builder_form"),
    (
        Changed(type=99, dimensions=[9]),
        """
        tensors.every_tensor_type_comes_back tensors.names_of_types_are_matched_loosely
        tensors.no_number_of_a_type_is_refused tensors.dimensions_are_not_checked
        """,
    ),
    (Changed(outputs=[["output", {}]]), "tensors.a_hundred_tensors_come_back"),
    (Changed(requests=0), "turns.usage_counts_the_turns_that_have_ended"),
    (ChangesComeLate(), "contexts.a_changed_session_is_sent_before_the_reply"),
    (OneFrameAtATime(), "frames.frames_may_arrive_together"),
    (OneTurn(), "contexts.a_context_runs_one_turn_at_a_time errors.SessionBusy"),
    (
        NoReplies(),
        "frames.a_frame_may_arrive_in_pieces greeting.requests_may_follow_the_hello_at_once",
    ),
    (
        IdsAreChanged(),
        """
        frames.every_int_is_an_id greeting.a_label_may_have_every_allowed_character
        malformed.credit_for_a_request_that_is_over_is_ignored
        """,
    ),
)
"""Each fault, and patterns of the cases that it must fail, every one of them."""
