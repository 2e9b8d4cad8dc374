-- The index of the compile cache: what there is, how often it was used, what it saved.
--
-- The blobs are the truth. Every row of "entries" and "key_parts" can be made again from the
-- blobs' headers, so this file may be deleted at any time; only the usage figures start anew.
-- Nothing is executed on the word of this file: a blob is verified by its own digests.
--
-- History of the schema. A new version gets a new file name, index-N.sqlite, so that an older and
-- a newer snaprt can share one directory:
--   1  entries, key_parts, totals
--   2  sizes; entries.pinned and entries.worth, for eviction

-- One row a blob.
CREATE TABLE entries (
    key             TEXT PRIMARY KEY NOT NULL,       -- the key's digest, and the blob's file name
    name            TEXT NOT NULL DEFAULT '',        -- the program, as its maker called it
    kind            TEXT NOT NULL DEFAULT '',        -- what the payload is, such as "compiled"
    platform        TEXT NOT NULL DEFAULT '',        -- cpu, gpu, tpu
    device_kind     TEXT NOT NULL DEFAULT '',        -- such as "TPU v5e"
    jax_version     TEXT NOT NULL DEFAULT '',
    jaxlib_version  TEXT NOT NULL DEFAULT '',
    compile_seconds REAL NOT NULL DEFAULT 0,         -- what making it cost, and a hit saves
    payload_bytes   INTEGER NOT NULL DEFAULT 0,      -- before compression
    stored_bytes    INTEGER NOT NULL DEFAULT 0,      -- the whole blob file
    created         REAL NOT NULL DEFAULT 0,         -- Unix time in seconds
    last_used       REAL NOT NULL DEFAULT 0,         -- Unix time in seconds; 0: never hit
    hits            INTEGER NOT NULL DEFAULT 0,
    saved_seconds   REAL NOT NULL DEFAULT 0,         -- over all hits
    pinned          INTEGER NOT NULL DEFAULT 0,      -- 1: never evicted; a copy of the folder pins
    worth           REAL NOT NULL DEFAULT 0          -- the least is evicted first; see worth.py
);

-- The order of eviction.
CREATE INDEX entries_by_worth ON entries (worth);

-- The named parts of each key, in their order.
CREATE TABLE key_parts (
    key      TEXT NOT NULL,                          -- entries.key
    position INTEGER NOT NULL,
    name     TEXT NOT NULL,                          -- such as "jaxlib version"
    value    TEXT NOT NULL,
    PRIMARY KEY (key, position)
) WITHOUT ROWID;

-- What happened, over all processes, by day (UTC, YYYY-MM-DD). The events are those that the
-- metrics count: PersistentCacheHit, PersistentCacheMiss, PersistentCacheSavedSeconds, ...
CREATE TABLE totals (
    day   TEXT NOT NULL,
    event TEXT NOT NULL,
    value REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (day, event)
) WITHOUT ROWID;

-- One row: the sums over "entries", so that a put need not add up all rows to know whether there
-- is too much. The triggers keep it.
CREATE TABLE sizes (
    id            INTEGER PRIMARY KEY CHECK (id = 1),
    entries       INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    stored_bytes  INTEGER NOT NULL
);

INSERT INTO sizes VALUES (1, 0, 0, 0);

CREATE TRIGGER sizes_after_insert AFTER INSERT ON entries BEGIN
    UPDATE sizes SET entries = entries + 1,
                     payload_bytes = payload_bytes + new.payload_bytes,
                     stored_bytes = stored_bytes + new.stored_bytes;
END;

CREATE TRIGGER sizes_after_update AFTER UPDATE OF payload_bytes, stored_bytes ON entries BEGIN
    UPDATE sizes SET payload_bytes = payload_bytes + new.payload_bytes - old.payload_bytes,
                     stored_bytes = stored_bytes + new.stored_bytes - old.stored_bytes;
END;

CREATE TRIGGER sizes_after_delete AFTER DELETE ON entries BEGIN
    UPDATE sizes SET entries = entries - 1,
                     payload_bytes = payload_bytes - old.payload_bytes,
                     stored_bytes = stored_bytes - old.stored_bytes;
END;
