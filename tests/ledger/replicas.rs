//! What a ledger in PostgreSQL promises beyond the contract: several processes share it, and the server may fail.
