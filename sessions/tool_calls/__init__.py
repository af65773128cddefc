"""Tool calls in answers: parsed while the text arrives, in the form of the model's chat template.

`source` has the text, `reader` reads one call, `formats` the forms, `parser` puts them together.
"""
