//! The paying client, over real connections.
mod bodies;
mod channels;
mod concurrent;
mod discovery;
mod hostile;
mod layer;
mod middleware;
mod our_seller;
mod permits;
mod purchase;
mod reconcile;
mod status;
mod unclear;
mod uploads;
mod upto;
mod v1;
