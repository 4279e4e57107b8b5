"""What people write by hand: one confluent-kafka process that copies a topic exactly once.

Consume, produce, send the offsets, commit: one transaction for 10,000 records. A record that
cannot be handled would stop it, and nothing keeps keys in order where one fails.
"""

from __future__ import annotations

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from bench.peers import report, task

TRANSACTION_RECORDS = 10_000


def main() -> None:
    """Copy all events of the topic up to the end that it has now."""
    given = task()
    consumer = Consumer(
        {
            "bootstrap.servers": given.bootstrap,
            "group.id": f"loop-{given.topic}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    producer = Producer(
        {
            "bootstrap.servers": given.bootstrap,
            "transactional.id": f"loop-{given.topic}",
            "linger.ms": 5,
            "queue.buffering.max.messages": 500_000,
        }
    )
    producer.init_transactions(30)
    spots = [TopicPartition(given.topic, number, 0) for number in range(given.partitions)]
    left = sum(consumer.get_watermark_offsets(spot, timeout=10)[1] for spot in spots)
    consumer.assign(spots)
    while left:
        messages: list[Message] = []
        while len(messages) < min(TRANSACTION_RECORDS, left):
            messages += consumer.consume(TRANSACTION_RECORDS - len(messages), timeout=0.05)
        copy(producer, consumer, given.options["to"], messages)
        left -= len(messages)
        report(len(messages))
    consumer.close()


def copy(producer: Producer, consumer: Consumer, to: str, messages: list[Message]) -> None:
    """One transaction."""
    producer.begin_transaction()
    ends: dict[tuple[str, int], int] = {}
    for message in messages:
        producer.produce(to, message.value(), message.key())
        ends[message.topic() or "", message.partition() or 0] = (message.offset() or 0) + 1
    producer.send_offsets_to_transaction(
        [TopicPartition(*spot, end) for spot, end in ends.items()],
        consumer.consumer_group_metadata(),
        30,
    )
    producer.commit_transaction(30)


if __name__ == "__main__":
    main()
