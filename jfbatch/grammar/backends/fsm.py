"""What our own grammars (grammar.py) say of themselves beside the other backends."""

from __future__ import annotations

from jfbatch.grammar.backends.protocol import KINDS, STYLES, Capabilities

CAPABILITIES = Capabilities(
    name="fsm",
    title="jfbatch's own",
    tested_version="",
    kinds=dict.fromkeys(KINDS, "")
    | {
        "schema": "says which keywords only the check of the output holds",
        "regex": "Python's syntax, look-around included; no back-references",
        "grammar": "GBNF and Lark's syntax, without a lexer",
        "tags": "tool calls and structural tags, in free text",
    },
    styles=STYLES,
    vouches=True,
    recursion="yes",
    undeclared_properties="as --objects says",
    forced_bytes="exact, from the automaton",
    endings="exact, from the automaton",
    rollback="a state per token; any number of tokens",
    notes=("The only one whose grammars go to the disk cache and are explored ahead.",),
)
