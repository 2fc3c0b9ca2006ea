"""nginx in front of several front ends, as one address for the clients. Pure.

Its prefix (``-p``) is the run directory, and all paths are relative to it, so an ordinary user can run it. Requests
may be long, and answers are streams of tokens that may take hours: nothing is buffered, and time limits are long. An
upstream that does not answer is skipped. All processes of nginx share what they know of the upstreams (``zone``), else
one that was asked before the front ends were up would refuse requests long after.
"""

from collections.abc import Sequence

from launcher.planner.frontends import Service

FILE = "nginx.conf"
# each stream takes two descriptors, and the soft limit is often 1024
_WITH_MANY_FILES = ("sh", "-c", 'ulimit -Sn "$(ulimit -Hn)"; exec "$@"', "sh")
SHELL_PREFIX_LENGTH = len(_WITH_MANY_FILES)  # words before its own program
# in the foreground, with errors on stderr
_OPTIONS = ("-p", "{run_dir}/", "-e", "stderr", "-c", FILE, "-g", "daemon off;")
NGINX = Service("nginx", ("public",), (*_WITH_MANY_FILES, "nginx", *_OPTIONS))
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def render_nginx_config(port: str, upstreams: Sequence[str]) -> str:
    """Render the configuration: listen on ``port`` and distribute requests among the ``upstreams``."""
    servers = "\n".join(f"        server {upstream} max_fails=1 fail_timeout=3s;" for upstream in upstreams)
    folders = "\n".join(f"    {name}_temp_path nginx_temp;" for name in _TEMPORARY)
    return f"""pid nginx.pid;
error_log stderr warn;
worker_processes 4;
events {{
    worker_connections 16384;
}}
http {{
    access_log off;
{folders}
    upstream frontends {{
        zone frontends 256k;
{servers}
        keepalive 1024;
    }}
    server {{
        listen {port} backlog=4096;
        client_max_body_size 0;
        client_body_timeout 24h;
        large_client_header_buffers 8 256k;
        keepalive_timeout 1h;
        keepalive_requests 1000000;
        location / {{
            proxy_pass http://frontends;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_request_buffering off;
            proxy_buffering off;
            proxy_connect_timeout 5s;
            proxy_read_timeout 24h;
            proxy_send_timeout 24h;
        }}
    }}
}}
"""
