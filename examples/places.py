"""A handler that waits for others: up to 32 events at once per slot, those of one key in order.

Needs:
    create table places (id text primary key, city text, country text not null);
"""

import asyncio

from sideline import Event, Pipeline, Upsert

COUNTRIES = {"Oslo": "NO", "Lyon": "FR", "Osaka": "JP"}

places = Pipeline("places", topics="places", concurrency=32)


@places.setup
def connect():
    """Once per worker process; what it returns is event.context."""
    return COUNTRIES


@places.handler
async def locate(event: Event):
    place = event.json()
    async with asyncio.timeout(2):
        country = await ask(event.context, place["city"])
    return Upsert("places", {"id": place["id"], "city": place["city"], "country": country}, "id")


async def ask(countries, city):
    await asyncio.sleep(0.005)  # a service that takes its time
    return countries[city]
