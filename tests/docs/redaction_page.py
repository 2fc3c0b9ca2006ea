"""The page of redaction, written from the tables of the code."""

from collections.abc import Iterable

from exporter.logs.redact import redact
from exporter.logs.secret_forms import PROGRAMS, SHAPES

PAGE = """\
# Redaction

gpujob shows parts of logs to others: the last errors in `/status` and the report, and the last lines in diagnostics.
Secrets in them are replaced by `<redacted>`. The logs themselves are the worker's own and stay as they are.

Redaction finds what the forms on this page have. It is no proof that a text has no secret:
give secrets to workers by [`secrets`](job-file.md#secrets), and do not print them.

## By the name or the place

Every value is replaced. Behind `token` and the like, numbers and words such as `<pad>` or `auto` stay.
So do the values of `password_file`, `secret_name` and other names that only tell about a secret.

{sure}
## Where an ordinary word may stand

A value is replaced if it has at least six characters, letters among them, and a digit or one of `!@#$^&+`,
and if it is neither a path nor an expression with `=` or brackets. So `pass: backward` and `pwd: /home/ada` stay.

{unsure}
## In options of programs

`-p` is a password for some programs and a port for others, so these options count only behind their program.

```text
{programs}```

## Keys of services

The keys of these services are recognized anywhere, by their form: {services}.
"""
SURE = (
    ("a name with `passw`, `passphrase`, `secret` or `credential`", "db_password=hunter22"),
    ("a name that ends in `TOKEN`, `JWT`, `AUTH`, `BEARER`", "HF_TOKEN=hunter22"),
    ("`key` behind the name of its owner, or in a variable", "api-key: hunter22"),
    ("`pass` and `pwd` behind the name of their owner", "DB_PASS=hunter22"),
    ("an option, in a command or in a list", "['train.py', '--hf-token', 'hunter22', '--lr', '0.1']"),
    ("JSON, YAML, TOML, a dictionary, an argument in a traceback", '{"client_secret": "hunter22", "x": 1}'),
    ("a name and a value, as in a container's description", '{"name": "HF_TOKEN", "value": "hunter22"}'),
    ("a line that sets a variable", "setenv HF_TOKEN hunter22"),
    ("a header with credentials", "Authorization: Bearer hunter22"),
    ("cookies", "Set-Cookie: session=hunter22; Path=/"),
    ("a password in a URL or in a connection string", "postgresql://ada:hunter22@db:5432/x"),
    ("a signature in a URL", "https://b.s3.amazonaws.com/x?X-Amz-Signature=hunter22"),
    ("web hooks", "https://hooks.slack.com/services/T000/B000/hunter22"),
    (
        "a private key (PEM), also without its beginning or end",
        "-----BEGIN PRIVATE KEY-----\\nMIIEvQ...\\n-----END PRIVATE KEY-----",
    ),
    ("a web token (JWT)", "eyJhbGciOiJI.eyJzdWIi.c2lnbmF0dXJl"),
)
UNSURE = (
    ("`pass`, `pwd`, `creds` and names that end in `_PAT`", "pass=hunter22"),
    ("a password or secret in a sentence", "the password is hunter22"),
    ("a pair or a cell of a table", "('x-api-key', 'hunter22')"),
    ("`token` or `API key` in a sentence: 16 characters that alternate", "Invalid token a1b2c3d4e5f6a7b8c9d0"),
)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """A table of secrets and of how an example is shown."""
    shown = ((what, redact(example.replace("\\n", "\n"))) for what, example in rows)
    return "| Secret | Shown as |\n|---|---|\n" + "".join(f"| {what} | `` {text} `` |\n" for what, text in shown)


def redaction_page() -> str:
    return PAGE.format(
        sure=_table(SURE),
        unsure=_table(UNSURE),
        programs="".join(f"{redact(program.example)}\n" for program in PROGRAMS),
        services=", ".join(shape.service for shape in SHAPES),
    )
