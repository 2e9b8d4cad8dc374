-- The index of the compile cache: what there is, how often it was used, what it saved.
--
-- The blobs are the truth. Every row of "entries" and "key_parts" can be made again from the
-- blobs' headers, so this file may be deleted at any time; only the usage figures start anew.
-- Nothing is executed on the word of this file: a blob is verified by its own digests. A file
-- that defines anything else than this one is deleted: no trigger and no view runs.
--
-- History of the schema. A new version gets a new file name, index-N.sqlite, so that an older and
-- a newer snaprt can share one directory; so does any change inside a statement:
--   1  entries, key_parts, totals
--   2  sizes; entries.pinned and entries.worth, for eviction
--   3  without sizes, its triggers, and entries.pinned: the blobs' files and the pins say it

-- One row a blob. (What "see worth.py" below names is now `worth_of` in index.py.)
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
    worth           REAL NOT NULL DEFAULT 0          -- the least is evicted first; see worth.py
) WITHOUT ROWID;

-- Adds up in a fraction of the time that the table takes.
CREATE INDEX entries_by_size ON entries (stored_bytes);

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
