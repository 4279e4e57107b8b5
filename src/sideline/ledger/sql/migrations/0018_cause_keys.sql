-- What came back is kept without its key, but a cause may quote it for as long as nothing else fails
-- like that: whose words they are is known here, so that they can be erased with the key.
alter table sideline.causes
    add column last_key bytea;
