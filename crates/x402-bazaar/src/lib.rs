#![doc = include_str!("../README.md")]
//!
//! # How a resource gets into a list
//!
//! A server declares the extension in its 402. Payers echo it, so that the facilitator that settles gets it and can list the
//! route at `GET /discovery/resources`. The form is that of the
//! [specification](https://github.com/coinbase/x402/blob/main/specs/extensions/bazaar.md) and of the official packages:
//! `info` holds examples, `schema` describes `info` in JSON Schema.
//!
//! | feature | adds | default |
//! |---|---|---|
//! | `client` | `DiscoveryClient`, which reads what a facilitator lists | yes |

// docs.rs shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "client")]
mod client;
mod description;
mod schema;

#[cfg(feature = "client")]
pub use client::{
    Discovered, DiscoveryClient, DiscoveryClientBuilder, DiscoveryEnd, DiscoveryError, DiscoveryFilter, DiscoveryPage,
    ListedResource,
};
pub use description::{BodyType, Discovery, InvalidDiscovery, NAME, check};
pub use schema::SchemaError;
