"""Formats of strings, as patterns. Each tells texts of the format, not all that there are."""

from __future__ import annotations

__all__ = ("FORMATS",)

_LEAP = r"([1-9]\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29"
_DATE = (
    r"([1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    rf"|02-(0[1-9]|1\d|2[0-8]))|{_LEAP})"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-z0-9]([a-z0-9]{0,29}[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_DOMAIN = rf"({_LABEL}\.){{1,3}}[a-z]{{2,12}}"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(\d{1,4}[YMWD]|T\d{1,4}[HMS]|\d{1,4}DT\d{1,2}H|T\d{1,4}H\d{1,2}M)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
    "ipv6": r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_+-]{{1,30}}(\.[A-Za-z0-9_+-]{{1,30}})?@{_DOMAIN}",
    "uri": rf"https?://{_DOMAIN}(:[1-9]\d{{0,3}})?(/[A-Za-z0-9._~-]{{1,60}}){{0,8}}"
    r"(\?[A-Za-z0-9._~=&-]{1,120})?",
}
