"""GBNF grammars: llama.cpp's examples (`grammars/`, MIT), and small ones with traps."""

from __future__ import annotations

__all__ = ("GRAMMARS",)

GRAMMARS = {
    "arithmetic": r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*""",
    "c": r"""root ::= (declaration)*
declaration ::= dataType identifier "(" parameter? ")" "{" statement* "}"
dataType  ::= "int" ws | "float" ws | "char" ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= dataType identifier
statement ::=
    ( dataType identifier ws "=" ws expression ";" ) |
    ( identifier ws "=" ws expression ";" ) |
    ( identifier ws "(" argList? ")" ";" ) |
    ( "return" ws expression ";" ) |
    ( "while" "(" condition ")" "{" statement* "}" ) |
    ( "for" "(" forInit ";" ws condition ";" ws forUpdate ")" "{" statement* "}" ) |
    ( "if" "(" condition ")" "{" statement* "}" ("else" "{" statement* "}")? ) |
    ( singleLineComment ) |
    ( multiLineComment )
forInit ::= dataType identifier ws "=" ws expression | identifier ws "=" ws expression
forUpdate ::= identifier ws "=" ws expression
condition ::= expression relationOperator expression
relationOperator ::= ("<=" | "<" | "==" | "!=" | ">=" | ">")
expression ::= term (("+" | "-") term)*
term ::= factor(("*" | "/") factor)*
factor ::= identifier | number | unaryTerm | funcCall | parenExpression
unaryTerm ::= "-" factor
funcCall ::= identifier "(" argList? ")"
parenExpression ::= "(" ws expression ws ")"
argList ::= expression ("," ws expression)*
number ::= [0-9]+
singleLineComment ::= "//" [^\n]* "\n"
multiLineComment ::= "/*" ( [^*] | ("*" [^/]) )* "*/"
ws ::= ([ \t\n]+)""",
    "chess": r"""root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?""",
    "english": r"""root        ::= en-char+ ([ \t\n] en-char+)*
en-char     ::= letter | digit | punctuation
letter      ::= [a-zA-Z]
digit       ::= [0-9]
punctuation ::= [!"#$%&'()*+,-./:;<=>?@[\\\]^_`{|}~]""",
    "japanese": r"""root        ::= jp-char+ ([ \t\n] jp-char+)*
jp-char     ::= hiragana | katakana | punctuation | cjk
hiragana    ::= [ぁ-ゟ]
katakana    ::= [ァ-ヿ]
punctuation ::= [、-〾]
cjk         ::= [一-鿿]""",
    "json": r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}""",
    "json_arr": r"""root   ::= arr
value  ::= object | array | string | number | ("true" | "false" | "null") ws
arr  ::=
  "[\n" ws (
            value
    (",\n" ws value)*
  )? "]"
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [1-9] [0-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}""",
    "list": r'''root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"''',
    "longest is wrong": 'root ::= a "x"\na ::= [a-z]+',
    "any text and an end": 'root ::= .* "</x>"',
    "one is the begin of another": 'root ::= ("a" | "ab") "bc"',
    "escaped letter": 'root ::= "\\u00e9" | [\\u0400-\\u04FF]{1,3} | "\\U0001F600"',
    "no times": 'root ::= "a"{0} "b" "c"{0,0} ([d]{0} | "e")',
    "rule called start": 'root ::= start end\nstart ::= "a" | "b"\nend ::= "c"',
    "ambiguous": 'root ::= (a | b)* "." \na ::= "x" "y"?\nb ::= "xy" | "x"',
    "empty rules": 'root ::= a b a "z"\na ::= | "x"\nb ::= ("y" | )',
    "nested groups": 'root ::= ((("a" | "b")+ "," )* ";"){1,2}',
    "negated": 'root ::= [^a-z\\n]+ "q" [^"\\\\]* "\\""',
    "slashes": 'root ::= "/" [/\\]\\[\\-^]+ "\\\\" "|"',
    "comments": '# first\nroot ::= "a" # an a\n  # more\n\nb ::= "c"\n',
    "windows lines": 'root ::= x\r\nx ::= "a" | "b"\r\n',
    "a rule twice": 'root ::= x\nx ::= "a"\nx ::= "b"',
    "control characters": 'root ::= [\\x00-\\x1F]+ "\\t" "\\x7F"',
    "unreachable": 'root ::= "a"\nother ::= "b" other',
    "right recursion": 'root ::= "(" root ")" | "x" root | ""',
    "tokens": 'root ::= "a" <[300]> "b" | <|im_start|> [a-z]+ <|im_end|>?',
    "no token": 'root ::= !<[300]> !<|im_start|> "b"',
    "many alternatives": "root ::= " + " | ".join(f'"x{i}"' for i in range(300)),
    "many letters": "root ::= [" + "".join(map(chr, range(0x4E00, 0x5E00))) + "]+",
}
