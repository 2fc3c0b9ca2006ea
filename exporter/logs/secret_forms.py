"""Patterns of secrets, as data: keys of services and options of programs.

`docs/reference/redaction.md` lists the rows, and tests redact every example.
"""

from typing import NamedTuple

_OPTION = r"""[\s"',\\]"""  # before an option: a space, or what separates the words of a printed list
# Between an option and its value.
_VALUE = r"""(?:(?:\\{1,4}n|[\s"',\\]){1,90}(?:\[[^\]\n]{1,40}\]:?[ ])?(?:-[ ]{1,8}["']?)?|=["'\\]{0,2})"""
_SECRET = r"(?P<secret>(?!<redacted>)[^\s\"'`\\]+)"  # noqa: S105


class Shape(NamedTuple):
    """Keys that one service makes, recognized anywhere."""

    service: str
    pattern: str
    example: str


class Program(NamedTuple):
    """Options with which some programs take a password.

    The pattern's ``secret`` is replaced; ``value`` begins before it.
    """

    programs: str  # a pattern of their names
    pattern: str  # searched from the program to the end of its command
    example: str


def _option(names: str, before: str = "") -> str:
    return f"{_OPTION}(?:{names}){_VALUE}(?P<value>{before}[\"']?{_SECRET})"


SHAPES = (
    Shape("AWS", "(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ABIA|ACCA)[A-Z0-9]{12,}", "AKIAIOSFODNN7EXAMPLE"),
    Shape(
        "Google", r"AIza[\w-]{30,} | ya29\.[\w-]{20,} | GOCSPX-[\w-]{20,}", "AIzaSyD-0123456789abcdefghijklmnopqrstu"
    ),
    Shape("Azure", r"[\w~.-]{3}[78]Q~[\w~.-]{31,34}", "abc8Q~0123456789abcdefghijklmnopqrstuv"),
    Shape("Hugging Face", "hf_[A-Za-z0-9]{16,} | api_org_[A-Za-z0-9]{16,}", "hf_abcdefghijklmnopqrstuvwxyz012345"),
    Shape(
        "OpenAI, Anthropic, OpenRouter, LiteLLM",
        r"sk-[\w-]{0,40}?[A-Za-z0-9]{16}[\w-]*",
        "sk-proj-abcdefghijklmnopqrstuvwxyz012345",
    ),
    Shape(
        "Groq, xAI, Perplexity, Replicate, Fireworks, Pinecone",
        "(?:gsk_|xai-|pplx-|r8_|fw_|pcsk_)[A-Za-z0-9_]{20,}",
        "gsk_abcdefghijklmnopqrstuvwxyz012345",
    ),
    Shape(
        "Weights & Biases, LangSmith, NVIDIA",
        r"wandb_v1_\w{20,} | lsv2_[a-z]{2}_\w{20,} | nvapi-[\w-]{16,}",
        "nvapi-abcdefghijklmnopqrstuvwxyz",
    ),
    Shape(
        "GitHub, GitLab",
        r"gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{20,}"
        r" | gl(?:pat|ptt|dt|rt|ft|imt|soat|cbt|agent|sa|c)[-_][\w-]{16,}",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    ),
    Shape("Slack", r"xox[a-z]-[\w-]{8,} | xoxe\.xox[a-z]-[\w-]{8,} | xapp-[\w-]{8,}", "xoxb-123456789012-abcdefghijkl"),
    Shape("Stripe", "[srp]k_(?:live|test)_[A-Za-z0-9]{10,} | whsec_[A-Za-z0-9]{16,}", "sk_live_abcdefghijklmnop"),
    Shape(
        "npm, PyPI, Docker, Vault, Databricks, DigitalOcean, Sentry, Tailscale, Atlassian, Notion",
        r"""npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,} | dckr_[op]at_[\w-]{16,} | hv[sbr]\.[\w-]{20,} | dapi[0-9a-f]{32}
        | do[opr]_v1_[0-9a-f]{32,} | sntry[su]_[\w=+/-]{20,} | tskey-[\w-]{16,} | AT[AC]TT3[\w=-]{20,} | ntn_\w{20,}""",
        "npm_abcdefghijklmnopqrstuvwxyz0123456789",
    ),
    Shape("SendGrid", r"SG\.[\w-]{16,}\.[\w-]{16,}", "SG.abcdefghijklmnopqrst.uvwxyz0123456789"),
    Shape("Telegram", r"\d{8,10}:AA[\w-]{32,}", "123456789:AAabcdefghijklmnopqrstuvwxyz01234567"),
    Shape("age", "AGE-SECRET-KEY-1[A-Z0-9]{20,}", "AGE-SECRET-KEY-1QQQQQQQQQQQQQQQQQQQQQQQQ"),
)

USER_AND = r"(?!//)[^\s:\"'`\\]{0,100}:(?!//)"  # the user before a password

PROGRAMS = (
    Program("curl", _option("-u|-U|--user|--proxy-user", USER_AND), "curl -u ada:hunter22 https://example.org"),
    Program(
        "curl", _option("-b|--cookie|--oauth2-bearer", r"(?=\S*=|ey)"), "curl -b session=a1b2c3d4 https://example.org"
    ),
    Program(
        "mysql[a-z]{0,12}|mariadb[a-z-]{0,12}|7z[a-z]?",
        rf"{_OPTION}-p(?!ort|ipe|rompt|rint|ager)[\"']?{_SECRET}",
        "mysqldump -u root -phunter22 items",
    ),
    Program("sshpass", rf"{_OPTION}-p(?:{_VALUE})?{_SECRET}", "sshpass -p hunter22 ssh node1"),
    Program(
        r"(?:docker|podman|nerdctl|buildah|skopeo|helm(?:[ ]registry)?|oras|az(?:[ ]acr)?)[\s\"',]{1,8}login",
        _option("-p|--password"),
        "docker login -u ada -p hunter22 registry.example.org",
    ),
    Program("mongo(?:sh|dump|restore|export|import)?", _option("-p"), "mongosh -u ada -p hunter22"),
    Program("redis-cli", _option("-a"), "redis-cli -h cache -a hunter22"),
    Program("sqlcmd|bcp|ipmitool|(?:un)?zip", _option("-P"), "ipmitool -H bmc1 -U admin -P hunter22 power status"),
    Program("ldap(?:search|add|modify|delete|whoami|passwd)", _option("-w|-s"), "ldapsearch -D cn=ada -w hunter22"),
    Program(
        "smbclient|rpcclient|smbget", _option("-U", r"[^\s%\"']{0,100}%"), "smbclient //host/share -U ada%hunter22"
    ),
    Program("lftp", _option("-u", r"[^\s,\"']{0,100},"), "lftp -u ada,hunter22 ftp.example.org"),
    Program(
        "openssl",
        rf"{_OPTION}-pass(?:in|out)?{_VALUE}pass:{_SECRET}",
        "openssl rsa -in key.pem -passin pass:hunter22",
    ),
    Program(
        r"wandb[\s\"',]{1,8}login",
        r"[\s\"',](?P<secret>(?:local-)?(?=\w{0,80}[A-Za-z]\d)(?=\w{0,80}\d[A-Za-z])\w{16,})",
        "wandb login --relogin 0123456789abcdef0123456789abcdef01234567",
    ),
    Program(
        r"wandb\.login",
        rf"\([^()\n]{{0,200}}?\bkey=[bru]?[\"']{_SECRET}",
        "wandb.login(key='0123456789abcdef0123456789abcdef01234567')",
    ),
    Program(
        r"vault[\s\"',]{1,8}login",
        r"[\s\"',](?!token\b)(?P<secret>(?![-<])(?=[\w.-]{0,200}\d)[\w.-]{8,})(?=[\s\"',]|$)",
        "vault login 0123abcd-4567-89ab-cdef-0123456789ab",
    ),
    Program("sqlplus", rf"[\s\"'][\w$#]{{1,40}}/{_SECRET}(?=@|[\s\"']|$)", "sqlplus ada/hunter22@db"),
    Program("https?|xh", _option("-a|--auth", USER_AND), "http -a ada:hunter22 GET https://example.org"),
    Program(
        "auth=|(?:[A-Za-z]{1,20}\\.){0,3}(?:HTTP)?(?:Basic|Digest)Auth",
        rf"\(\s*[bru]?[\"'][^\"'\n]{{0,100}}[\"'],\s*[bru]?[\"']{_SECRET}",
        "HTTPBasicAuth('ada', 'hunter22')",
    ),
    Program(
        "echo|printf",
        rf"\s(?P<value>[\"']?{_SECRET})[\"']?[ \t]*\|[^|\n]{{0,200}}?"
        r"(?:\s--(?:password-|with-)?(?:stdin|token)|sudo\s-S|kinit)\b",
        "echo hunter22 | docker login -u ada --password-stdin registry.example.org",
    ),
    Program(
        "IDENTIFIED",
        rf"\s(?:WITH\s\w{{1,40}}\s)?BY\s(?:PASSWORD\s)?[\"'\\]{{1,3}}{_SECRET}",
        "CREATE USER ada IDENTIFIED BY 'hunter22'",
    ),
)
