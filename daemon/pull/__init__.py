"""Download of model files into the models directory, by the command line, never by the daemon.

`target.fetch` runs in the caller's process. It owns, under a lock, the unfinished files of one
name, ``NAME.gguf.part`` and ``NAME.gguf.part.json``. One rename publishes the model after its
checks. The next pull resumes or removes the files of an interrupted one.
A daemon uses the lock, the unfinished file and its checks for models that other daemons send.
"""
