"""What the API server answers to a request that it refuses."""

from __future__ import annotations

from support.kubernetes.kinds import Kind, Object


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str, **details: object) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.details = details

    @property
    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def not_found(kind: Kind, name: str) -> ApiError:
    return ApiError(
        404, "NotFound", f'{kind.resource} "{name}" not found', kind=kind.plural, name=name
    )


def invalid(kind: Kind, name: str, causes: list[str]) -> ApiError:
    found = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
    what = f"{kind.name}.{kind.group}" if kind.group else kind.name
    return ApiError(422, "Invalid", f'{what} "{name}" is invalid: {found}', kind=kind.name)


def forbidden(kind: Kind, name: str, why: str) -> ApiError:
    return ApiError(403, "Forbidden", f'{kind.resource} "{name}" is forbidden: {why}')


def gone(version: int) -> ApiError:
    return ApiError(410, "Expired", f"too old resource version: {version}")
