import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.time.Duration;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;

/** A copy by Kafka Streams, exactly once: a thread for each slot, until it is ended. */
public final class CopyTopic {
    private static final Duration END = Duration.ofSeconds(10);

    public static void main(String[] arguments) throws Exception {
        JsonNode task = new ObjectMapper().readTree(System.getenv("BENCH_TASK"));
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(task.get("topic").asText()).to(task.get("options").get("to").asText());
        KafkaStreams streams = new KafkaStreams(builder.build(), settings(task));
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        // A client that gave up leaves nothing that could go on: the process ends with it.
        streams.setStateListener((now, before) -> {
            if (now == KafkaStreams.State.ERROR) {
                Runtime.getRuntime().halt(1);
            }
        });
        Runtime.getRuntime().addShutdownHook(new Thread(() -> streams.close(END)));
        streams.start();
    }

    private static Properties settings(JsonNode task) {
        Properties settings = new Properties();
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, task.get("bootstrap").asText());
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, task.get("options").get("group").asText());
        settings.put(StreamsConfig.STATE_DIR_CONFIG, task.get("workdir").asText());
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, task.get("slots").asInt());
        settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.ByteArraySerde.class);
        settings.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.ByteArraySerde.class);
        // Few, large transactions and requests: a commit a second took the least CPU of 100 ms to 1 s.
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 1_000);
        settings.put(StreamsConfig.BUFFERED_RECORDS_PER_PARTITION_CONFIG, 10_000);
        settings.put(ConsumerConfig.MAX_POLL_RECORDS_CONFIG, 10_000);
        settings.put(ConsumerConfig.MAX_PARTITION_FETCH_BYTES_CONFIG, 4_000_000);
        settings.put(ProducerConfig.BATCH_SIZE_CONFIG, 500_000);
        settings.put(ProducerConfig.LINGER_MS_CONFIG, 100);
        settings.put(ProducerConfig.BUFFER_MEMORY_CONFIG, 128L << 20);
        return settings;
    }
}
