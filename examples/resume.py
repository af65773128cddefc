"""A session that outlives its program, its connection and the daemon."""

import sys

import inferd

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
OPTIONS = {"n-predict": 24}

with inferd.Client() as client:
    with client.session(MODEL, session_id="notes", resume=True, options=OPTIONS) as session:
        print("continued" if session.attached else "new")
        print(session.chat("Remember: the meeting is at noon."))
    # The daemon may restart here. The id finds the session with its history and options.
    with client.session(MODEL, session_id="notes", resume=True) as session:
        print("continued" if session.attached else "new")
        print(session.chat("When is the meeting?"))
        session.delete()  # in memory and on disk
