"""Redact secrets in texts that others will read.

A secret is recognized by the name before it (``HF_TOKEN=...``, ``"password": "..."``, ``--api-key ...``), its context
(``Authorization:``, ``https://user:...@host``, ``sshpass -p ...``, a webhook, a private key block) or its format.
"""

import functools
import re
from collections.abc import Iterator, Mapping

from exporter.contract.lazy_regex import lazy_regex
from exporter.logs.secret_forms import PROGRAMS, SHAPES

REDACTED = "<redacted>"

EVERY_VALUE, NO_ORDINARY_VALUE, RANDOM_VALUE = 3, 2, 1  # which values under a name are secret

_WORD = lazy_regex(
    r"passw|passphrase|secret|cred|token|auth|cookie|bearer|jwt|key|pass|pwd|pw(?![A-Za-z])|signature|sig|pat(?![A-Za-z])",
    re.IGNORECASE,
)  # parts of names of secrets; searched first, since most lines contain none
_NAME_CHARACTERS = lazy_regex(r"[\w.-]*")
_LONGEST_NAME = 100
_WORDS_OF_NAME = lazy_regex(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_STRONG = ("passw", "passphrase", "passcode", "secret", "credential")
_ABOUT_SECRETS = frozenset(
    {"reset", "file", "path", "dir", "name", "policy", "length", "version", "count", "expiry", "expires", "required"}
    | {"type", "manager", "changed", "age", "attempts", "enabled", "rotation", "store", "provider", "helper", "stdin"}
)  # last words of names such as `password_file`, whose values are no secrets
_KEY_OWNERS = frozenset(
    {"api", "access", "secret", "private", "encryption", "signing", "license", "ssh", "account", "auth", "master"}
    | {"service", "subscription", "deploy", "client", "storage", "hf", "wandb", "openai", "anthropic", "azure", "aws"}
    | {"gcp", "google", "cohere", "mistral", "together", "groq", "neptune", "comet", "ngc", "nvidia", "databricks"}
)  # words that make a following `key` secret, unlike `sort_key` or `cache_key`
_PASS_OWNERS = frozenset({"db", "user", "smtp", "mail", "proxy", "root", "admin", "pg", "mysql", "redis", "ftp"})
_NO_PASSWORDS = frozenset({"bypass", "compass", "encompass", "surpass"})  # though they end in `pass`
_PAT_OWNERS = frozenset({"git", "github", "gitlab", "azure", "ado", "devops", "access"})
_WEAK = frozenset({"token", "jwt", "auth", "cookie", "bearer", "apikey", "accesskey"}) | {
    f"{kind}token" for kind in ("access", "api", "auth", "bearer", "id", "refresh")
}
_HEADERS = frozenset({"authorization", "cookie"})

_BREAK = (
    r"(?:\r?\n|(?:\\{1,4}r)?\\{1,4}n)(?:\[[^\]\n]{1,40}\]:?[ ]?)?"  # real or escaped, and a mark such as `[rank0]: `
)
_SEPARATOR = lazy_regex(
    rf"""(?:\\*["'`])?\]?[ \t]*(?:                                    # the end of a quoted name or of an index
      :[ \t]*(?:str|Optional\[str\]|str[ ]\|[ ]None)[ \t]*=(?!=)[ \t]* # a parameter with its type
    | (?:,?{_BREAK}|,|(?<=["'])[ ])\s{{0,80}}(?:\\*["'])?[Vv]alue(?:\\*["'])?[ \t]*[:=][ \t]* # a pair of name and value
    | (?:=>|:=|==?|:(?!//))[ \t]*(?:{_BREAK}\s{{0,80}}(?=\\*["']))?   # JSON may go on in the next line
    | {_BREAK}[ ]{{2,4}}[^\n]{{1,200}}\[type=[^\n]{{1,80}}?input_value= # pydantic
    )""",
    re.VERBOSE,
)
_OPTION_SEPARATOR = lazy_regex(rf"""(?:\\*["'])?(?:[ \t]*,(?:{_BREAK})?\s{{0,40}}|[ \t]+)(?!--)""")
_SETTER = lazy_regex(r"(?<![\w-])(?:export|setenv|putenv|set[ ]-[gUx]{1,3}|ENV|ARG)[ \t]{1,9}$")  # its name follows
_CELL_SEPARATOR = lazy_regex(r"[ \t]*[|\u2502\u2503][ \t]*")
_NEVER_IN_PROSE = ("pass", "pwd", "creds", "authorization", "cookie")
_TUPLE_SEPARATOR = lazy_regex(r"""\\*["'],[ \t]*(?=[bru]?\\*["'])""")
_PROSE = lazy_regex(r"[ \t]{1,9}((?:is|was|provided|given|used)\b[ \t]{0,9}:?[ \t]{0,9}|:[ \t]{0,9})?", re.IGNORECASE)
_LINE = r"(?:(?!\\{1,4}n)[^\r\n])"
_BLOCK = lazy_regex(
    rf"[|>][-+\d]{{0,2}}[ \t]*{_BREAK}([ \t]{{1,80}}){_LINE}+(?:{_BREAK}\1{_LINE}*){{0,50}}"
)  # a block of YAML
_LIST = lazy_regex(
    r"""\[(?=\\*["'])((?:"[^"\n]{0,400}"|'[^'\n]{0,400}'|[^\]"'\n]{1,40}+){1,100}+)\]"""
)  # its texts may have brackets
_OPENING = lazy_regex(r"""(?:[A-Za-z_]\w{0,30}\()?[bfruBFRU]{0,2}(\\*["'`])""")
_SCHEME = lazy_regex(r"(?:Bearer|Basic|Token|Digest|Negotiate|ApiKey)[ \t]+(?=\S)", re.IGNORECASE)
_BARE = lazy_regex(r"\S+")
_AFTER_VALUE = ",;)]}\"'`>\\"
_NOTHING = lazy_regex(r"(?:None|null|nil|true|false|True|False|\*{3,}|\[?<redacted>?)$")
_ORDINARY = lazy_regex(
    r"(?:tensor\()?[\[(]?[-+]?[\d,]{1,12}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?"
    r"(?:k|K|M|B|s|ms|us|%|/s|tok/s|tokens/s|it/s|/[\d,]{1,12})?[,;.)\]}\"']{0,3}$"
    r"|[<\[]\|?/?[A-Za-z_/]{1,24}\|?[>\]][,;)\]}\"']{0,3}$|(?:-?inf|nan|auto|none|no|yes|on|off|unknown|N/A|n/a|-)[,;.)]?$"
)  # values of `token` in training logs: numbers, and vocabulary words such as `<pad>`
_MARKS = r"(?![~./\\$*%-]|[A-Za-z]:\\)(?=[^\s\"']{0,80}[A-Za-z])(?=[^\s\"']{0,80}[\d!@#$^&+])"
_RANDOM = lazy_regex(
    _MARKS + r"[^\s\"'`,;=()\[\]{}<>|]{6,}={0,2}"
)  # neither a word, a number, a path nor an expression
_RANDOM_TEXT = lazy_regex(_MARKS + r"\S{6,}")  # the same in quotes
_EXPRESSION = ("=", "(", "[", "{")  # after a word: it is a name
_LONG_RANDOM = lazy_regex(
    r"(?=[\w+/=.-]{0,200}[A-Za-z]\d)(?=[\w+/=.-]{0,200}\d[A-Za-z])(?![\w+/=.-]{0,200}__)[\w+/=.-]{16,}"
)  # where an ordinary word may follow a name
_BARE_SCHEME = lazy_regex(
    r"\b(Bearer\s{1,4})(?!<redacted>)[^\s\"'\\,;]{6,}|\b(Basic\s)(?=[A-Za-z+/]{0,200}[\d=])[A-Za-z0-9+/]{12,}={0,2}"
)

_SHAPES = lazy_regex(
    f"(?<![A-Za-z0-9])(?:{'|'.join(shape.pattern for shape in SHAPES)})"
    r"|(?<![\w-])eyJ[\w-]{8,}\.(?:eyJ[\w-]{4,}(?:\.[\w-]*)?|[\w-]*(?:\.[\w-]+){3})",
    re.VERBOSE,
)
_HOOKS = lazy_regex(
    r"(https?://(?:hooks\.slack\.com|(?:[\w-]{1,60}\.){0,4}discord(?:app)?\.com/api/webhooks"
    r"|(?:[\w-]{1,60}\.){1,6}webhook\.office\.com|(?:[\w-]{1,60}\.){1,6}logic\.azure\.com(?::\d{1,5})?"
    r"|api\.telegram\.org|chat\.googleapis\.com|(?:[\w-]{1,60}\.){0,6}[\w-]{1,60}(?::\d{1,5})?/(?:[\w-]{1,40}/){0,4}"
    r"(?:web)?hooks?)/)(?!<redacted>)[^\s\"'<>]+",
    re.IGNORECASE,
)
_USERINFO = lazy_regex(
    r"([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s/@:\"'<>]{0,200})(:[^\s/\"'<>]{1,500}|:(?!\d{1,5}/)[^\s@:\"'<>]{1,80})?@(?=[^\s@/])",
    re.IGNORECASE,
)
_GO_DSN = lazy_regex(r"((?<![\w.-])[\w.-]{1,60}:)[^\s/:\"'<>]{1,200}(?=@(?:tcp|unix)\()")  # as in user:...@tcp(host)
_KEY_BEGIN = lazy_regex(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_END = lazy_regex(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINE = lazy_regex(r".{0,80}?[A-Za-z0-9+/]{16,}={0,2}[\s\"',\\]{0,8}$|(?:Proc-Type|DEK-Info):")
_SHORT_KEY_LINE = lazy_regex(r"(?:\S{1,20} )?[A-Za-z0-9+/]{0,64}={0,2}$")
_KEY_BYTES = 32 * 1024


def redact(text: str) -> str:
    """Replace the secrets in a text by ``<redacted>``."""
    text = _without_key_blocks(text)
    text = _HOOKS.sub(rf"\1{REDACTED}", text)
    text = _USERINFO.sub(_without_userinfo, text)
    text = _GO_DSN.sub(rf"\1{REDACTED}", text)
    text = _SHAPES.sub(REDACTED, text)
    text = _redact_commands(text)
    text = _redact_named_values(text)
    return _BARE_SCHEME.sub(lambda match: f"{match[1] or match[2]}{REDACTED}", text)


def redact_all(body: Mapping[str, object]) -> dict[str, object]:
    """Redact all texts of a JSON object."""
    return {redact(key): _redact_value(value, key) for key, value in body.items()}


def _redact_value(value: object, name: str) -> object:
    if isinstance(value, str):
        weight = _secrecy_weight(name)
        secret = weight > RANDOM_VALUE or (weight == RANDOM_VALUE and _RANDOM.fullmatch(value))
        return REDACTED if value and secret and not _NOTHING.match(value) else redact(value)
    if isinstance(value, Mapping):
        return redact_all({str(key): entry for key, entry in value.items()})
    if isinstance(value, list | tuple):
        return [_redact_value(entry, name) for entry in value]
    return value


def _secrecy_weight(name: str) -> int:
    """Which values under the name are secret; 0 if none is."""
    words = [word.lower() for word in _WORDS_OF_NAME.findall(name) if not word.isdigit()]
    last, before = ([*words[:-3:-1], "", ""])[:2]
    if any(word in name.lower() for word in _STRONG):
        return 0 if last in _ABOUT_SECRETS else EVERY_VALUE
    is_upper_case = name.isupper()
    if last == "key":
        return EVERY_VALUE if before in _KEY_OWNERS or is_upper_case else 0
    if last == "id":
        return EVERY_VALUE if words[-3:-1] == ["access", "key"] else 0
    if last in ("pwd", "pass") and (before in _PASS_OWNERS or (last == "pwd" and before not in ("", "old"))):
        return EVERY_VALUE
    if last in ("pwd", "pw") or (last.endswith("pass") and last not in _NO_PASSWORDS):
        return RANDOM_VALUE if last != "pass" or not before or name.startswith("-") else 0
    if last in ("signature", "sig"):
        return EVERY_VALUE if before in ("amz", "goog") or name.startswith(("?", "&")) else 0
    if last in _HEADERS:
        return EVERY_VALUE
    if last in ("pat", "creds"):
        return RANDOM_VALUE if last == "creds" or before in _PAT_OWNERS or (before and is_upper_case) else 0
    return NO_ORDINARY_VALUE if last in _WEAK or (is_upper_case and not _WEAK.isdisjoint(words)) else 0


@functools.cache
def _programs() -> tuple[re.Pattern[str], tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]]:
    """A pattern of all programs, and for each form those of its programs and of its option."""
    every = "|".join(dict.fromkeys(form.programs for form in PROGRAMS))
    forms = tuple((re.compile(rf"(?:{form.programs})\Z"), re.compile(form.pattern)) for form in PROGRAMS)
    return re.compile(rf"(?<![\w.-])(?:{every})(?=[\s\"'\\,(])"), forms


_END_OF_COMMAND = lazy_regex(
    r"(?<![\\,\[(])(?<![\\,\[(]\r)\n(?!(?:\[[^\]\n]{1,40}\]:?)?[ \t]{0,40}- )|[;|&]{1,2}[ \t]"
)  # lists and `\\` go on in the next line


def _redact_commands(text: str) -> str:
    """Redact passwords in the options of programs."""
    spans = sorted(set(_command_spans(text)))
    parts, done = list[str](), 0
    for begin, end in spans:
        if begin >= done:
            parts += [text[done:begin], REDACTED]
            done = end
    return "".join((*parts, text[done:]))


def _command_spans(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each password in an option."""
    every, forms = _programs()
    at = 0
    while first := every.search(text, at):
        stop = _END_OF_COMMAND.search(text, first.end())
        at = stop.start() if stop is not None else len(text)
        names = dict.fromkeys(match[0] for match in every.finditer(text, first.start(), at))
        line_end = text.find("\n", at)
        for program, option in forms:
            if any(map(program.match, names)):
                for found in option.finditer(text, first.end(), line_end if line_end >= 0 else len(text)):
                    if found.start() >= at:
                        break
                    begin, end = found.span("secret")
                    before = (
                        text[begin - 1],
                        text[found.start("value" if "value" in option.groupindex else "secret") - 1],
                    )
                    quoted = max((_value_end(text, quote, begin) for quote in before if quote in "\"'"), default=0)
                    yield begin, max(quoted, begin + _bare_length(text[begin:end]))


def _bare_length(word: str) -> int:
    """Length of a value without quotes: without what ends it in a list or sentence."""
    redacted = word.rfind(REDACTED)
    return max(len(word.rstrip(_AFTER_VALUE)), redacted + len(REDACTED) if redacted >= 0 else 0) or len(word)


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
        if text[start - 1 : start] == "\\" and name[0] in "nrt" and not _secrecy_weight(name):
            start, name = start + 1, name[1:]  # behind an escaped line break
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
    separator, random = _SEPARATOR.match(text, end), _RANDOM
    if separator is None:
        if name.startswith("-"):
            separator = _OPTION_SEPARATOR.match(text, end)
            weight = max(weight, NO_ORDINARY_VALUE) if name.endswith("pass") else weight
        elif text[start - 1 : start] == "<" and text[end : end + 1] == ">":  # XML
            begin, close = end + 1, text.find(f"</{name}", end, end + 1000)
            return (begin, close) if close > begin and text[begin:close].strip() else None
        elif _SETTER.search(text, max(0, start - 24), start):
            separator, weight = _PROSE.match(text, end), max(weight, NO_ORDINARY_VALUE)
        elif pair := _TUPLE_SEPARATOR.match(text, end) if _is_in_tuple(text, start) else None:
            separator, weight = pair, RANDOM_VALUE
        elif (cell := _CELL_SEPARATOR.match(text, end)) and name.lower() not in _HEADERS:
            separator, weight = cell, RANDOM_VALUE
        elif not name.lower().endswith(_NEVER_IN_PROSE) and (prose := _PROSE.match(text, end)):
            sure = prose[1] or any(word in name.lower() for word in ("passw", "passphrase", "secret"))
            separator, weight, random = prose, RANDOM_VALUE, _RANDOM if sure else _LONG_RANDOM
    if separator is None:
        return None
    begin = separator.end()
    if block := _BLOCK.match(text, begin):
        return block.end(1), block.end()
    if (listed := _LIST.match(text, begin)) and weight > RANDOM_VALUE:
        words = (word.strip(" \\\"'") for word in listed[1].split(","))
        return None if weight == NO_ORDINARY_VALUE and all(map(_ORDINARY.match, words)) else listed.span(1)
    if opening := _OPENING.match(text, begin):
        begin = opening.end()
        close = _value_end(text, opening[1], begin)
        shown = close
    elif name.lower().rpartition("-")[2] in _HEADERS:
        before = text[start - 1 : start]
        shown = close = _value_end(text, before if before in ('"', "'") else "\n", begin)
    else:
        if scheme := _SCHEME.match(text, begin):
            begin = scheme.end()
        bare = (random if weight == RANDOM_VALUE else _BARE).match(text, begin)
        if bare is None or (weight == RANDOM_VALUE and text[bare.end() : bare.end() + 1] in _EXPRESSION):
            return None
        close, shown = begin + _bare_length(bare[0]), bare.end()
    if weight == NO_ORDINARY_VALUE and _ORDINARY.match(text, begin, shown):
        return None
    if (
        weight == RANDOM_VALUE
        and opening
        and not (_RANDOM_TEXT if random is _RANDOM else random).fullmatch(text, begin, close)
    ):
        return None
    return None if begin == close or _NOTHING.match(text, begin, close) else (begin, close)


def _is_in_tuple(text: str, start: int) -> bool:
    """Whether the quoted name at ``start`` is the first of a pair, as in ``("password", "...")``."""
    return text[start - 1 : start] in ('"', "'") and text[max(0, start - 12) : start - 1].rstrip("bru\\ ")[-1:] == "("


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
