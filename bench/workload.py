"""The rows that every speed is measured on: 64 short mails, invoices and call notes, and one schema.

Made from a fixed seed, so that they are the same texts for everyone. Needs nothing but Python, so that
each peer can import it in its own environment: `python -m bench.workload FILE.jsonl` writes them as rows.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

ROWS = 64
MAX_TOKENS = 200
_SEED = 20260101

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "email": {"type": "string", "maxLength": 60},
        "company": {"type": "string", "maxLength": 40},
        "category": {"enum": ["billing", "technical", "sales", "other"]},
        "priority": {"enum": ["low", "medium", "high"]},
        "order_id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
        "amount_usd": {"type": "number"},
        "needs_reply": {"type": "boolean"},
        "summary": {"type": "string", "maxLength": 120},
    },
    "required": ["name", "email", "company", "category", "priority", "order_id",
                 "amount_usd", "needs_reply", "summary"],
    "additionalProperties": False,
}  # fmt: skip

INSTRUCTION = (
    "Extract the record from the text as one line of JSON with the keys name, email, company, category "
    "(billing, technical, sales or other), priority (low, medium or high), order_id, amount_usd, needs_reply "
    "(true or false), summary (one short sentence).\n\nText:\n"
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_FIRST_NAMES = (
    *("Anna", "Brian", "Carla", "David", "Elena", "Farid", "Grace", "Henry", "Ingrid", "Jamal", "Kate"),
    *("Luis", "Mona", "Nikhil", "Olivia", "Peter", "Quinn", "Rosa", "Samir", "Tara"),
)
_LAST_NAMES = (
    *("Becker", "Chang", "Dubois", "Evans", "Fischer", "Garcia", "Hughes", "Ivanov", "Jensen", "Kim"),
    *("Lopez", "Murphy", "Nakamura", "Okafor", "Patel", "Rossi", "Silva", "Turner"),
)
_COMPANIES = (
    *("Acme Tools", "Blue River Ltd", "Cedar Labs", "Delta Foods", "Evergreen Systems", "Fairview Clinic"),
    *("Granite Works", "Harbor Logistics", "Ironwood Media", "Juniper Retail"),
)
_ITEMS = (
    *("office chairs", "laptop stands", "network switches", "printer cartridges", "desk lamps"),
    *("safety gloves", "water filters", "software licences", "standing desks", "security cameras"),
)
_ISSUES = (
    "I was charged twice for the same delivery and I would like the second charge to be refunded.",
    "The invoice total does not match the quote that your team sent us last month.",
    "The device stops responding after a few minutes and the status light keeps blinking red.",
    "Since the last update the dashboard shows an error and nobody in our office can log in.",
    "We are interested in ordering forty more units next quarter and would like a volume discount.",
    "Could you send me a quote for an annual contract that also includes on-site support?",
    "I only wanted to say thank you to the support team, everything arrived on time.",
    "Please note that our office has moved and the delivery address on file is no longer valid.",
)
_URGENCY = (
    "This is urgent, please answer today.",
    "Please get back to me this week.",
    "There is no hurry.",
    "No reply is needed.",
)
_MONTHS = ("January", "March", "April", "June", "August", "October", "December")


def documents(rows: int = ROWS) -> list[str]:
    """The first `rows` texts to extract from: a mail, an invoice and a call note in turn."""
    source = random.Random(_SEED)
    return [_document(source, number) for number in range(rows)]


def _document(source: random.Random, number: int) -> str:
    first, last, company = source.choice(_FIRST_NAMES), source.choice(_LAST_NAMES), source.choice(_COMPANIES)
    domain = re.sub("[^a-z]", "", company.lower()) + source.choice([".com", ".io", ".org"])
    address = f"{first.lower()}.{last.lower()}@{domain}"
    letters = "".join(source.choice("ABCDEFGHKLMNPRSTUVWX") for _ in range(2))
    order = f"{letters}-{source.randrange(10**6):06d}"
    amount = f"{source.randrange(20, 9000)}.{source.choice(['00', '50', '99', '25'])}"
    issue, urgency = source.choice(_ISSUES), source.choice(_URGENCY)
    item, quantity = source.choice(_ITEMS), source.randrange(2, 60)
    day, month = source.randrange(1, 28), source.choice(_MONTHS)
    if number % 3 == 0:
        text = (
            f"From: {first} {last} <{address}>\nTo: support@northwind.example\nSubject: Order {order}\n\n"
            f"Hello, I work at {company}. On {day} {month} we ordered {quantity} {item} for ${amount}. "
            f"{issue} {urgency}"
        )
        if source.random() < 0.5:
            text += f" You can reach me on extension {source.randrange(100, 999)}."
        return f"{text}\n\nKind regards,\n{first} {last}"
    if number % 3 == 1:
        return (
            f"INVOICE\nBill to: {company}\nAttention: {first} {last}\nEmail: {address}\nOrder: {order}\n"
            f"Date: {day} {month} 2025\nItem: {item}, quantity {quantity}\nTotal due: ${amount}\n"
            f"Note: {issue} {urgency}"
        )
    text = (
        f"{first} {last} from {company} called us on {day} {month} about order {order}. "
        f"The order was for {quantity} {item} and cost ${amount}. "
        f'The caller said: "{issue}" {urgency} The best address to write to is {address}.'
    )
    if source.random() < 0.5:
        text += f" {first} has been a customer since {source.randrange(2009, 2024)}."
    return text


def questions(rows: int = ROWS) -> list[str]:
    """What the user says in each row."""
    return [f"{INSTRUCTION}{document}\n\nJSON:" for document in documents(rows)]


def prompts(rows: int = ROWS) -> list[str]:
    """Each row as the demo model's chat template renders it; tokenise without adding special tokens."""
    return [
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in questions(rows)
    ]


def write_rows(path: Path, rows: int = ROWS) -> None:
    """The rows as jfbatch reads them."""
    lines = [
        {"id": f"row-{number:03}", "prompt": question} for number, question in enumerate(questions(rows))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]))
    print(json.dumps(SCHEMA))
