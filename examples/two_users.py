"""Isolation: sessions belong to their user, handles to their connection."""

import os
import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
DIARY = f"diary-{os.getpid()}"

with inferd.Client() as mine, inferd.Client() as other:
    graph = mine.load_by_name(MODEL)
    context = mine.init_execution_context_with_session_id(graph, DIARY)
    mine.set_input(context, 0, "Dear diary,")
    try:
        other.get_output(context, 0)  # the handle exists, but on another connection
    except inferd.InvalidArgument as exc:
        print("another connection:", exc.message)
    # The same user sees the session in a list; another user would not.
    print("user", os.getuid(), "has", [s["session_id"] for s in other.sessions()])
    try:
        elsewhere = other.load_by_name(MODEL)
        other.init_execution_context_with_session_id(elsewhere, DIARY)
    except inferd.SessionBusy as exc:
        print("the same id:", exc.message)
    mine.delete_session(context)  # in memory and on disk
