"""JSON schemas in llguidance's form.

`document` reads a schema, `malformed` finds its errors, `inference` adds keywords that it leaves
out, `rewriting` replaces keywords that llguidance refuses, and `schema_grammar` writes the grammar.
`refused_keyword` finds the keyword that prevents it, and leaves such keywords out on request.
`keyword_table` lists what is supported.
"""
