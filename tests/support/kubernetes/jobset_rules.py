"""JobSet's defaults and its own rules.

Source: kubernetes-sigs/jobset, pkg/webhooks/jobset_webhook.go, and the CEL rules in
api/jobset/v1alpha2/jobset_types.go.
"""

from __future__ import annotations

import copy
import re

from support.kubernetes.errors import invalid
from support.kubernetes.kinds import JOBSET, Object

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
IMMUTABLE = ("network", "successPolicy", "failurePolicy", "startupPolicy", "managedBy")
REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)


def set_defaults(jobset: Object) -> None:
    spec = jobset.setdefault("spec", {})
    spec.setdefault("successPolicy", {"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    for replicated in spec.get("replicatedJobs", ()):
        replicated.setdefault("replicas", 1)
        job = replicated["template"].setdefault("spec", {})
        job.setdefault("completionMode", "Indexed")
        job["template"].setdefault("spec", {}).setdefault("restartPolicy", "OnFailure")
    for number, rule in enumerate(spec.get("failurePolicy", {}).get("rules", ())):
        rule.setdefault("name", f"failurePolicyRule{number}")


def check(jobset: Object) -> None:
    """Raises ApiError."""
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    replicated = spec.get("replicatedJobs", [])
    names = [one["name"] for one in replicated]
    found = [f"replicatedJobs has {one!r} twice" for one in set(names) if names.count(one) > 1]
    subdomain = spec["network"].get("subdomain", "")
    if len(subdomain) > 63:
        found.append(".spec.network.subdomain is too long, must be less than 63 characters")
    elif subdomain and not LABEL.fullmatch(subdomain):
        found.append(_not_a_label(subdomain))
    for one in replicated:
        found += _check_names(name, one)
    policy = spec.get("failurePolicy", {})
    found += [
        f"invalid replicatedJob name '{target}' does not appear in .spec.ReplicatedJobs"
        for holder in (spec["successPolicy"], *policy.get("rules", ()))
        for target in holder.get("targetReplicatedJobs", ())
        if target not in names
    ]
    for rule in policy.get("rules", ()):
        if not RULE_NAME.fullmatch(rule["name"]):
            found.append(f"invalid failure policy rule name '{rule['name']}'")
        found += [
            f"invalid job failure reason '{reason}' in failure policy"
            for reason in rule.get("onJobFailureReasons", ())
            if reason not in REASONS
        ]
    coordinator = spec.get("coordinator")
    if coordinator and coordinator["replicatedJob"] not in names:
        found.append(f"coordinator replicatedJob {coordinator['replicatedJob']} does not exist")
    if found:
        raise invalid(JOBSET, name, found)


def _check_names(jobset: str, replicated: Object) -> list[str]:
    job = f"{jobset}-{replicated['name']}-{replicated['replicas'] - 1}"
    pods = replicated["template"]["spec"].get("completions", 1)
    made = {"job": job, "pod": f"{job}-{pods - 1}-abcde"}
    for what, longest in made.items():
        if len(longest) > 63:
            why = f"{what} names generated for this JobSet will exceed 63 characters"
            return [f"JobSet name is too long, {why}"]
        if not LABEL.fullmatch(longest):
            return [_not_a_label(longest)]
    return []


def _not_a_label(text: str) -> str:
    return (
        f"a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an"
        f" alphabetic character, and end with an alphanumeric character: {text!r}"
    )


def check_update(before: Object, after: Object) -> None:
    """Raises ApiError where an update changes more than `suspend`, or for a suspended JobSet
    more than what a queue sets."""
    old, new = copy.deepcopy(before["spec"]), copy.deepcopy(after["spec"])
    if old.get("suspend") or new.get("suspend"):
        for spec in (old, new):
            for replicated in spec.get("replicatedJobs", ()):
                template = replicated["template"]["spec"]["template"]
                for key in ("annotations", "labels"):
                    template.get("metadata", {}).pop(key, None)
                for key in ("nodeSelector", "tolerations", "schedulingGates"):
                    template["spec"].pop(key, None)
    changed = [
        f"spec.{key}: Invalid value: field is immutable"
        for key in ("replicatedJobs", *IMMUTABLE)
        if old.get(key) != new.get(key)
    ]
    if changed:
        raise invalid(JOBSET, after["metadata"]["name"], changed)
