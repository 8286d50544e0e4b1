"""Send requests to the API server of Kubernetes, from a pod or with a kubeconfig.

A run works without the results of these requests. So each request has a short time limit, and each
failure is reported in one sentence.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from holdfast.core.errors import HoldfastError

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
TIMEOUT_S = 5.0
CONFLICT = 409


class ApiError(HoldfastError):
    """The API server refused a request or cannot be reached.

    `status` is the HTTP status of the answer, or 0 if there was no answer.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Api(Protocol):
    """Send the requests that Holdfast needs; each path begins with `/api/` or `/apis/`."""

    def get(self, path: str) -> dict[str, Any]:
        """Return the object at a path.

        Raises:
            ApiError: the server does not answer, or does not return the object.
        """

    def patch(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a change into the object at a path (RFC 7386); return the changed object.

        Raises:
            ApiError: the server does not answer, or does not return the object.
        """


def namespace(environment: Mapping[str, str] = os.environ) -> str:
    """Return the namespace of this pod.

    The first of these that exists counts: POD_NAMESPACE, the namespace of the service account,
    "default".
    """
    if named := environment.get("POD_NAMESPACE"):
        return named
    try:
        return NAMESPACE.read_text().strip() or "default"
    except OSError:
        return "default"


def node_path(name: str) -> str:
    """Return the API path of a node."""
    return f"/api/v1/nodes/{name}"


def pod_path(name: str, in_namespace: str) -> str:
    """Return the API path of a pod."""
    return f"/api/v1/namespaces/{in_namespace}/pods/{name}"


def connect(environment: Mapping[str, str] = os.environ) -> Api:
    """Connect to the API server of KUBECONFIG; if unset, to the one of this pod's service account.

    Raises:
        ApiError: the client is not installed, or there are no credentials.
    """
    import yaml

    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ApiError(
            "The client of Kubernetes is not installed. Install it: pip install 'holdfast[kubernetes]'"
        ) from error
    configuration: Any = client.Configuration()
    loading: Any = config  # the package has no types
    try:
        if path := environment.get("KUBECONFIG"):
            loading.load_kube_config(path, client_configuration=configuration)
        else:
            loading.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, OSError, yaml.YAMLError) as error:
        why = str(error).rstrip(".")
        raise ApiError(
            f"There are no credentials for Kubernetes: {why}. Give the pod a service account, or set KUBECONFIG."
        ) from error
    configuration.retries = 0
    return _Client(client.ApiClient(configuration))


class _Client:
    """Send requests with the official client, but without its models, which drop unknown fields.

    Newer servers send fields that the models lack.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def get(self, path: str) -> dict[str, Any]:
        return self._request("GET", path)

    def patch(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/merge-patch+json"}
        return self._request("PATCH", path, headers, change)

    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            request = self._client.param_serialize(
                method=method,
                resource_path=path,
                header_params={"Accept": "application/json", **(headers or {})},
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = self._client.call_api(*request, _request_timeout=TIMEOUT_S)
            status, reason, data = answer.status, answer.reason, answer.read()
            found = json.loads(data) if 200 <= status < 300 else None
        except ApiException as error:
            status, reason, found = error.status or 0, error.reason, None
        except (HTTPError, OSError, ValueError) as error:
            raise ApiError(
                f"Kubernetes did not answer {method} {path}: {type(error).__name__}."
            ) from error
        if not isinstance(found, dict):
            raise ApiError(
                f"Kubernetes answered {method} {path} with {status} {reason}.", int(status)
            )
        return found
