"""Images and sounds for language models: decoding within bounds, libmtmd, and the program of the
process in which both run, because they read what anybody may have sent.
"""
