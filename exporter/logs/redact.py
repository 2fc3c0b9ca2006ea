"""Redact secrets in texts that others will read.

A secret is recognized by the name before it (``HF_TOKEN=...``, ``"password": "..."``, ``--api-key ...``), its context
(``Authorization:``, ``https://user:...@host``, a webhook, a private key block) or its format.
"""

import re
from collections.abc import Mapping

REDACTED = "<redacted>"

_WORD = re.compile(
    r"passw|passphrase|secret|credential|token|auth|cookie|bearer|jwt|key|pass|pwd|signature|sig", re.IGNORECASE
)  # parts of names of secrets; searched first, since most lines contain none
_NAME_CHARACTERS = re.compile(r"[\w.-]*")
_LONGEST_NAME = 100
_WORDS_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_STRONG = ("passw", "passphrase", "secret", "credential")
_KEY_OWNERS = frozenset(
    {"api", "access", "secret", "private", "encryption", "signing", "license", "ssh", "account", "auth", "master"}
    | {"service", "subscription", "deploy", "client", "storage", "hf", "wandb", "openai", "anthropic", "azure", "aws"}
    | {"gcp", "google", "cohere", "mistral", "together", "groq", "neptune", "comet", "ngc", "nvidia", "databricks"}
)  # words that make a following `key` secret, unlike `sort_key` or `cache_key`
_PASS_OWNERS = frozenset({"db", "user", "smtp", "mail", "proxy", "root", "admin", "pg", "mysql", "redis", "ftp"})
_WEAK = frozenset({"token", "jwt", "auth", "cookie", "bearer", "apikey", "authtoken", "accesskey"})
_HEADERS = frozenset({"authorization", "cookie"})

_SEPARATOR = re.compile(
    r"""(?:\\*["'`])?\]?[ \t]*(?:                                    # the end of a quoted name or of an index
      :[ \t]*(?:str|Optional\[str\]|str[ ]\|[ ]None)[ \t]*=(?!=)      # a parameter with its type
    | =>|:=|==?|:(?!//))[ \t]*(?:\n\s{0,80}(?=\\*["']))?              # JSON may go on in the next line
    """,
    re.VERBOSE,
)
_OPTION_SEPARATOR = re.compile(r"""(?:\\*["'])?(?:[ \t]*,\s{0,40}|[ \t]+)(?!--)""")
_OPENING = re.compile(r"""(?:[A-Za-z_]\w{0,30}\()?[bfruBFRU]{0,2}(\\*["'`])""")
_SCHEME = re.compile(r"(?:Bearer|Basic|Token|Digest|Negotiate|ApiKey)[ \t]+(?=\S)", re.IGNORECASE)
_BARE = re.compile(r"\S+")
_AFTER_VALUE = ",;)]}\"'`>\\"
_NOTHING = re.compile(r"(?:None|null|nil|true|false|True|False|\*{3,}|<redacted>?)$")
_ORDINARY = re.compile(
    r"(?:tensor\()?[\[(]?[-+]?[\d,]{1,12}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?"
    r"(?:k|K|M|B|s|ms|us|%|/s|tok/s|tokens/s|it/s|/[\d,]{1,12})?[,;.)\]}\"']{0,3}$"
    r"|[<\[]\|?/?[A-Za-z_/]{1,24}\|?[>\]][,;)\]}\"']{0,3}$|(?:-?inf|nan|auto)$"
)  # values of `token` in training logs: numbers, and vocabulary words such as `<pad>`
_BARE_SCHEME = re.compile(
    r"\b(Bearer\s{1,4})(?!<redacted>)[^\s\"'\\,;]{6,}|\b(Basic\s)(?=[A-Za-z+/]{0,200}[\d=])[A-Za-z0-9+/]{12,}={0,2}"
)

_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      (?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA)[A-Z0-9]{12,}
    | hf_[A-Za-z0-9]{16,}
    | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{20,} | gl(?:pat|ptt|dt)-[\w-]{16,}
    | xox[a-z]-[\w-]{8,} | xapp-[\w-]{8,}
    | sk-[\w-]{0,40}?[A-Za-z0-9]{16}[\w-]* | [srp]k_(?:live|test)_[A-Za-z0-9]{10,}
    | AIza[\w-]{30,} | ya29\.[\w-]{20,}
    | nvapi-[\w-]{16,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,} | dckr_pat_[\w-]{16,}
    | SG\.[\w-]{16,}\.[\w-]{16,}
    ) | (?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{4,}(?:\.[\w-]*)?
    """,
    re.VERBOSE,
)
_HOOKS = re.compile(
    r"(https?://(?:hooks\.slack\.com|(?:[\w-]{1,60}\.){0,4}discord(?:app)?\.com/api/webhooks"
    r"|(?:[\w-]{1,60}\.){1,6}webhook\.office\.com|(?:[\w-]{1,60}\.){1,6}logic\.azure\.com(?::\d{1,5})?"
    r"|api\.telegram\.org|chat\.googleapis\.com|(?:[\w-]{1,60}\.){0,6}[\w-]{1,60}(?::\d{1,5})?/(?:[\w-]{1,40}/){0,4}"
    r"(?:web)?hooks?)/)(?!<redacted>)[^\s\"'<>]+",
    re.IGNORECASE,
)
_USERINFO = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s/@:\"'<>]{0,200})(:[^\s/\"'<>]{1,500})?@(?=[^\s@/])", re.IGNORECASE
)
_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINE = re.compile(r".{0,80}?[A-Za-z0-9+/]{16,}={0,2}[\s\"',\\]{0,8}$|(?:Proc-Type|DEK-Info):")
_SHORT_KEY_LINE = re.compile(r"(?:\S{1,20} )?[A-Za-z0-9+/]{0,64}={0,2}$")
_KEY_BYTES = 32 * 1024


def redact(text: str) -> str:
    """Replace the secrets in a text by ``<redacted>``."""
    text = _without_key_blocks(text)
    text = _HOOKS.sub(rf"\1{REDACTED}", text)
    text = _USERINFO.sub(_without_userinfo, text)
    text = _SHAPES.sub(REDACTED, text)
    text = _redact_named_values(text)
    return _BARE_SCHEME.sub(lambda match: f"{match[1] or match[2]}{REDACTED}", text)


def redact_all(body: Mapping[str, object]) -> dict[str, object]:
    """Redact all texts of a JSON object."""
    return {redact(key): _redact_value(value, key) for key, value in body.items()}


def _redact_value(value: object, name: str) -> object:
    if isinstance(value, str):
        return REDACTED if value and _secrecy_weight(name) and not _NOTHING.match(value) else redact(value)
    if isinstance(value, Mapping):
        return redact_all({str(key): entry for key, entry in value.items()})
    if isinstance(value, list | tuple):
        return [_redact_value(entry, name) for entry in value]
    return value


def _secrecy_weight(name: str) -> int:
    """2: every value under the name is secret; 1: all but ordinary values; 0: none."""
    if any(word in name.lower() for word in _STRONG):
        return 2
    words = [word.lower() for word in _WORDS_OF_NAME.findall(name) if not word.isdigit()]
    last, before = ([*words[:-3:-1], "", ""])[:2]
    is_upper_case = name.isupper()
    if last == "key":
        return 2 if before in _KEY_OWNERS or is_upper_case else 0
    if last == "id":
        return 2 if words[-3:-1] == ["access", "key"] else 0
    if last in ("pwd", "pass"):
        return 2 if before in _PASS_OWNERS or (last == "pwd" and before not in ("", "old")) else 0
    if last in ("signature", "sig"):
        return 2 if before in ("amz", "goog") or name.startswith(("?", "&")) else 0
    if last in _HEADERS:
        return 2
    return 1 if last in _WEAK or (is_upper_case and not _WEAK.isdisjoint(words)) else 0


def _redact_named_values(text: str) -> str:
    """Redact values after the name of a secret."""
    parts: list[str] = []
    done = at = 0
    while match := _WORD.search(text, at):
        start, first = match.start(), max(done, match.start() - _LONGEST_NAME)
        while start > first and (text[start - 1].isalnum() or text[start - 1] in "_.-"):
            start -= 1
        rest = _NAME_CHARACTERS.match(text, match.end(), match.end() + _LONGEST_NAME)
        at = rest.end() if rest is not None else match.end()
        name = text[start:at]
        if text[start - 1 : start] in ("?", "&"):
            name = text[start - 1] + name
        elif name.lower() == "key" and text[start - 1 : start] == " ":
            name = "_".join((*text[max(0, start - 20) : start].split()[-1:], name))  # as in "API key: ..."
        found = _secret_span(text, start, at, name)
        if found is not None:
            parts += [text[done : found[0]], REDACTED]
            done = at = found[1]
    return "".join((*parts, text[done:]))


def _secret_span(text: str, start: int, end: int, name: str) -> tuple[int, int] | None:
    """Begin and end of the secret after the name at ``start`` to ``end``; None if there is none."""
    weight = _secrecy_weight(name)
    if not weight:
        return None
    separator = _SEPARATOR.match(text, end)
    if separator is None and name.startswith("-"):
        separator = _OPTION_SEPARATOR.match(text, end)
    if separator is None:
        return None
    begin = separator.end()
    if opening := _OPENING.match(text, begin):
        begin = opening.end()
        close = _value_end(text, opening[1], begin)
        if weight == 1 and _ORDINARY.match(text, begin, close):
            return None
    elif name.lower().rpartition("-")[2] in _HEADERS:
        before = text[start - 1 : start]
        close = _value_end(text, before if before in ('"', "'") else "\n", begin)
    else:
        if scheme := _SCHEME.match(text, begin):
            begin = scheme.end()
        bare = _BARE.match(text, begin)
        if bare is None or (weight == 1 and _ORDINARY.match(bare[0])):
            return None
        close = begin + len(bare[0].rstrip(_AFTER_VALUE) or bare[0])
    return None if begin == close or _NOTHING.match(text, begin, close) else (begin, close)


def _value_end(text: str, quote: str, begin: int) -> int:
    """End of a quoted value: its quote, or else the end of the line."""
    at = begin
    line_end = text.find("\n", begin)
    line_end = len(text) if line_end < 0 else line_end
    while (close := text.find(quote, at, line_end)) >= 0:
        backslashes = 0
        while close - backslashes > begin and text[close - backslashes - 1] == "\\":
            backslashes += 1
        if len(quote) > 1 or backslashes % 2 == 0:
            return close
        at = close + 1
    return line_end


def _without_userinfo(match: re.Match[str]) -> str:
    scheme, user, password = match[1], match[2], match[3]
    if password is not None:
        return f"{scheme}{user}:{REDACTED}@"
    return f"{scheme}{REDACTED}@" if len(user) >= 16 else match[0]


def _without_key_blocks(text: str) -> str:
    """Redact private keys, even if their beginning or end is cut off."""
    if "PRIVATE KEY" not in text:
        return text
    parts: list[str] = []
    at = 0
    while begin := _KEY_BEGIN.search(text, at):
        end = _KEY_END.search(text, begin.end(), begin.end() + _KEY_BYTES)
        parts += [text[at : begin.start()], REDACTED]
        at = end.end() if end is not None else _end_of_key_lines(text, begin.end())
    kept: list[str] = []
    for line in "".join((*parts, text[at:])).split("\n"):
        if end := _KEY_END.search(line):
            if kept and _SHORT_KEY_LINE.match(kept[-1][:400]):
                kept.pop()
            while kept and _KEY_LINE.match(kept[-1][:400]):
                kept.pop()
            line = REDACTED + line[end.end() :]
        kept.append(line)
    return "\n".join(kept)


def _end_of_key_lines(text: str, start: int) -> int:
    """End of the lines that resemble the inside of a key."""
    while True:
        line_end = text.find("\n", start)
        line_end = len(text) if line_end < 0 else line_end
        line = text[start : min(line_end, start + 400)]
        if not (_KEY_LINE.match(line) or _SHORT_KEY_LINE.match(line)):
            return start
        if line_end == len(text):
            return line_end
        start = line_end + 1
