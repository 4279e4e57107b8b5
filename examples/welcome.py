"""A handler that acts on the outside world itself: a POST for every new user.

The receiver gets what it needs to notice a repeated or a belated call: a key that is the same
in every attempt, and a number that grows whenever the partition gets another owner.
"""

import json
import os
import urllib.error
import urllib.request

from sideline import Calls, Event, NonRecoverable, Pipeline, Recoverable

SERVER_ERRORS = 500

welcome = Pipeline("welcome", topics="users", sink=Calls(), handler_timeout="10s", concurrency=8)


@welcome.handler
def greet(event: Event):
    user = event.json()
    if user is None:
        return
    request = urllib.request.Request(  # noqa: S310 - the address is ours
        os.environ["WELCOME_URL"],
        data=json.dumps({"to": user["id"], "name": user["name"]}).encode(),
        headers={
            "Content-Type": "application/json",
            "Idempotency-Key": event.id,
            "Fencing-Token": ".".join(map(str, event.delivery.lease)),
        },
    )
    try:
        urllib.request.urlopen(request, timeout=5).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= SERVER_ERRORS:
            raise Recoverable(f"the mailer answered {error.code}") from error
        raise NonRecoverable(f"the mailer refused: {error.code}") from error
    except urllib.error.URLError as error:
        raise Recoverable(f"the mailer is away: {error.reason}") from error
