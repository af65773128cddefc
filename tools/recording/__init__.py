"""The recording of the first minutes in docs/: a terminal session as asciicast and as a picture."""
