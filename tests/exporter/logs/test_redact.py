import base64
import json
import string
import time

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from exporter.logs.redact import REDACTED, redact, redact_all

SECRET_NAMES = st.sampled_from(
    [
        *("HF_TOKEN", "hf_token", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
        *("password", "PGPASSWORD", "db_passwd", "DB_PASS", "MYSQL_PWD", "client_secret", "clientSecret", "apiKey"),
        *("api-key", "access_token", "accessToken", "GITHUB_TOKEN", "auth_token", "NGC_KEY", "passphrase", "x-api-key"),
        *("credentials", "Credential", "session.cookie", "JWT", "private_key", "SECRET_1", "token", "MASTER_KEY"),
    ]
)
ALPHABET = string.ascii_letters + string.digits
PLAIN = st.text(ALPHABET, min_size=6, max_size=40)
RICH = st.builds("{}{}".format, st.text(ALPHABET + "!#$%*+/=?@^_~.:-", min_size=6, max_size=40), st.sampled_from("aZ9"))
"""Secrets with the marks that passwords have, and without those that end a value: quotes, brackets, commas."""
LONG = st.text(ALPHABET, min_size=20, max_size=40)
AROUND = st.sampled_from(
    ["", "step 3: ", "[rank0]: ", "2025-11-22 04:13:41 INFO ", "export ", "(", "env={", "INFO:root:args ", "a=1 ", "+ "]
)


def without_ordinary(secret: str) -> None:
    """Numbers and placeholder words are no secrets, even under a secret name."""
    assume(not secret.isdigit() and secret.lower() not in ("false", "true") and set(secret) != {"*"})


@given(AROUND, SECRET_NAMES, st.sampled_from(["=", ": ", " = "]), st.sampled_from(["", "'", '"']), RICH)
@example("", "HF_TOKEN", "=", "", "hf_abcdefgh")
@example("", "token", ": ", "", "12345abcde")
@example("(", "password", "=", "", "123456a")
def test_a_value_with_a_secret_name_is_always_redacted(
    around: str, name: str, separator: str, quote: str, secret: str
) -> None:
    without_ordinary(secret)
    assume(not secret.startswith("="))  # which is then read as the separator `==`
    shown = redact(f"{around}{name}{separator}{quote}{secret}{quote} loss=0.25\nnext line")
    assert secret not in shown
    assert shown.startswith(f"{around}{name}{separator}{quote}{REDACTED}")
    assert shown.endswith("\nnext line")
    if quote:
        assert shown.endswith(f"{quote} loss=0.25\nnext line")


FORMS = [
    "--token {}",
    "--hf-token={} --lr 0.1",
    "['train.py', '--api-key', '{}', '--lr', '0.1']",
    '"{{\\"password\\": \\"{}\\"}}"',
    '{{"a": {{"client_secret": "{}"}}}}',
    '"token":\n    "{}"',
    "os.environ['WANDB_API_KEY'] = '{}'",
    "def login(token: str = '{}'):",
    "Config(password=SecretStr('{}'), lr=0.1)",
    "{{'token': b'{}', 'x': 1}}",
    "API key: {}",
    "auth=Bearer {}",
    "Authorization: Bearer {}",
    "authorization: Basic {}",
    "Authorization: Digest username=ada, response={}",
    "curl -H 'Authorization: {}' https://example.org",
    "'Authorization': 'Bearer {}'",
    "sent Bearer {}",
    "Cookie: theme=dark; session={}",
    "https://example.org/x?a=1&token={}&b=2",
    "https://bucket.s3.amazonaws.com/x?X-Amz-Signature={}",
    "https://acct.blob.core.windows.net/x?sv=1&sig={}",
    "https://ada:{}@example.org/x.git",
    "postgresql+asyncpg://ada:{}@db:5432/x",
    "https://xxxxxxxxxx{}@github.com/x.git",
    "https://hooks.slack.com/services/T000/B000/{}",
    "https://discord.com/api/webhooks/123/{}",
    "https://ops.example.org:8443/v1/webhook/{}",
    "https://api.telegram.org/bot{}/sendMessage",
]


@pytest.mark.parametrize("form", FORMS)
@given(around=AROUND, secret=PLAIN)
def test_a_secret_in_a_typical_place_is_always_redacted(form: str, around: str, secret: str) -> None:
    without_ordinary(secret)
    assume(secret not in form)
    assert secret not in redact(f"{around}{form.format(secret)}\nnext line")


SHAPES = {
    "hf_{}": LONG,
    "ghp_{}": LONG,
    "gho_{}": LONG,
    "github_pat_{}": LONG,
    "glpat-{}": LONG,
    "xoxb-{}": LONG,
    "xoxp-123-{}": PLAIN,
    "AKIA{}": st.text(string.ascii_uppercase + string.digits, min_size=16, max_size=16),
    "sk-{}": LONG,
    "sk-proj-{}": LONG,
    "sk-ant-api03-{}": LONG,
    "nvapi-{}": LONG,
    "AIza{}": st.text(ALPHABET + "_-", min_size=35, max_size=35),
    "eyJhbGciOiJI.eyJzdWIi.{}": LONG,
}


@pytest.mark.parametrize("shape", SHAPES)
@given(st.data())
def test_a_secret_with_a_known_format_is_always_redacted(shape: str, data: st.DataObject) -> None:
    secret = shape.format(data.draw(SHAPES[shape]))
    around = data.draw(
        st.sampled_from(["{}", "login with {} failed", "'{}'", "x={},y=1", "[{}]", "https://h/{}/x", "<{}>"])
    )
    shown = redact(around.format(secret))
    assert secret not in shown
    assert shown == around.format(REDACTED)


@given(
    st.binary(min_size=300, max_size=900), st.integers(0, 30), st.integers(0, 30), st.sampled_from(["", "[rank0]: "])
)
@example(b"0" * 300, 0, 0, "")
@example(b"0" * 300, 3, 0, "")
def test_a_private_key_is_redacted_even_if_truncated(raw: bytes, first: int, last: int, mark: str) -> None:
    body = [base64.b64encode(raw[at : at + 48]).decode() for at in range(0, len(raw), 48)]
    block = ["-----BEGIN RSA PRIVATE KEY-----", *body, "-----END RSA PRIVATE KEY-----"]
    kept = block[min(first, len(block) - 1) :]
    kept = kept[: max(1, len(kept) - last)] if first == 0 else kept  # either end may be cut off
    shown = redact("\n".join(mark + line for line in ["before all of it", *kept]) + "\n" * (last == 0))
    assert not any(line in shown for line in body if len(line) == 64)
    assert "before all of it" in shown


def test_a_private_key_inside_json_is_redacted() -> None:
    text = json.dumps({"key": "-----BEGIN PRIVATE KEY-----\nMIIabcdefghijklmnop\n-----END PRIVATE KEY-----\n", "a": 1})
    assert redact(text) == '{"key": "<redacted>\\n", "a": 1}'


NUMBER = st.one_of(st.integers(0, 10**9).map(str), st.floats(0, 1e6).map(repr), st.floats(0, 1).map("{:.2e}".format))
TRAINING_NAMES = st.sampled_from(
    [
        *("loss", "lr", "epoch", "step", "tokens", "num_tokens", "max_tokens", "tokens_per_second", "pad_token_id"),
        *("token", "n_token", "sort_key", "cache_key", "key", "author", "tokenizer", "keys", "forward_pass", "passes"),
        *("key_padding_mask", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "sha", "signal", "monkey", "turkey", "compass"),
        *("token_type_ids", "authors", "attention.key.weight", "design", "bypass"),
    ]
)


@given(st.lists(st.tuples(TRAINING_NAMES, st.sampled_from(["=", ": ", " = "]), NUMBER), min_size=1, max_size=6))
def test_ordinary_values_of_a_training_log_stay(pairs: list[tuple[str, str, str]]) -> None:
    text = "[rank0]: " + ", ".join("".join(pair) for pair in pairs)
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "Processed 1200/3125 items, 41.2 items/s, loss=0.12 lr=1e-05 grad_norm: 0.83",
        "commit 2ee5c3c0f1e2d3c4b5a69788796a5b4c3d2e1f00 sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d",
        "pad_token='<pad>' eos_token=</s> mask_token=[MASK] sep_token: '[SEP]' bos_token=<|endoftext|>",
        "sort_key=name key=value cache_key=abcdef0123456789 partition_key: user monkey=1",
        "tokenizer=gpt2 tokens/s: 1200 token: 42k tokens_per_batch=4096 token=[101, 2023]",
        "KeyError: 'module.encoder.key.weight'",
        'File "/home/ada/project/auth/token.py", line 12, in get_token',
        "https://example.org:8080/path?x=1&y=2 and ftp://host/x, mail ada@example.org",
        "git@github.com:ada/repo.git, pip install git+https://github.com/ada/repo@main",
        "PWD=/home/ada OLDPWD=/tmp XAUTHORITY=/home/ada/.Xauthority",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total)",
        "[rank1]:[E1122 ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
        "password: None, token=null, use_auth_token=False, secret=***",
        "sk-learn-contrib and scikit, hf_hub_download, ghp is a prefix, Basic training configuration, Bearer",
        "signal 9, signature mismatch in design, significant: yes, compass: north",
        "author: Ada, authors=3, keyboard: us, turkey: bird, passes=3 passed: 12 bypass=on compass=n",
        "  0%|          | 0/100 [00:00<?, ?it/s]",
    ],
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert redact(text) == text


@given(st.text(), st.sampled_from(FORMS), PLAIN)
def test_redacting_twice_changes_nothing(text: str, form: str, secret: str) -> None:
    once = redact(f"{text} {form.format(secret)}")
    assert redact(once) == once


def test_json_values_are_redacted_by_their_keys() -> None:
    value = {
        "env": {"HF_TOKEN": "abc", "LR": "0.1", "TOKEN": None},
        "argv": ["--token", "ghp_" + "a" * 36],
        "tokens": 5,
    }
    assert redact_all(value) == {
        "env": {"HF_TOKEN": REDACTED, "LR": "0.1", "TOKEN": None},
        "argv": ["--token", REDACTED],
        "tokens": 5,
    }


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "a",
            "token",
            "token=",
            "key ",
            "eyJ",
            "-eyJ",
            "sk-",
            "sk-a",
            "https://",
            "https://a:",
            "a@",
            "a.",
            "a/",
            "x://",
        ),
        *("'", '\\"', "token='\\'", '"token":\n', "-----BEGIN PRIVATE KEY-----\n", "-----END PRIVATE KEY-----\n"),
        *(
            "-----BEGIN PRIVATE KEY-----",
            "Bearer ",
            "Basic a",
            "--token ",
            "https://a.a.a.a/a/a/",
            "SG.",
            "\n",
            "(",
            "AKIA",
        ),
    ],
)
def test_hostile_text_takes_bounded_time(piece: str) -> None:
    text = (piece * (64 * 1024))[: 64 * 1024]
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 2
