"""The keys below `notify`: who learns how a run ends."""

from __future__ import annotations

from typing import get_args

from dtrain.spec import value_rules as rules
from dtrain.spec.model import Notify, NotifyEvent
from dtrain.spec.problems import Problems
from dtrain.spec.scalars import Choice, Text
from dtrain.spec.schema import Field, ListOf, Section, SectionType
from dtrain.spec.words import Words

NOTIFY = SectionType(
    {
        "on": Field(
            ListOf(
                Choice(get_args(NotifyEvent)),
                unique=True,
                minimum=1,
                advice="write a list: [failed, done]",
            ),
            "The events to notify about: the job failed (or no host can be reached any more), it is"
            " done, or it failed and restarts. There is no notification for a run that you stop.",
            otherwise="all of them",
            example="[failed]",
        ),
        "command": Field(
            Words(Text(lines=True), program=True),
            "A program to run on the launching machine, in the cluster file's folder, with its "
            "arguments (a list or a string, see job.command). It reads the report from stdin, as "
            "one JSON object.",
            otherwise="none",
            example="[./notify.sh, ml@example.org]",
        ),
        "webhook": Field(
            SectionType(
                {
                    "secret": Field(
                        rules.VARIABLE,
                        "Variable of your own environment that has the URL. The URL never appears "
                        "in dtrain's messages and records.",
                        required=True,
                        example="SLACK_URL",
                    )
                }
            ),
            "A URL to which dtrain posts the report, as one JSON object.",
            otherwise="none",
        ),
    }
)


def read_notify(document: Section) -> Notify | None:
    """The valid values of the key ``notify``; None without the key."""
    if "notify" not in document:
        return None
    notify = document.section("notify")
    webhook = notify.section("webhook").get("secret")
    return Notify(webhook=webhook, **notify.given("on", "command"))


def check_notify(document: Section, problems: Problems) -> None:
    notify = document.section("notify")
    if "notify" in document and not {"command", "webhook"} & notify.entries.keys():
        problems.add(
            "notify needs a command or a webhook",
            document.key_place("notify"),
            "add 'command: [./notify.sh]', or 'webhook: {secret: NAME}' for a URL in the variable"
            " NAME",
        )
