//! HTTP/1.1 on a port, within bounds.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};
use tokio_io_timeout::TimeoutStream;
use tower::ServiceExt as _;
use tower_service::Service;

use crate::error::Error;

/// The most connections that are open at once, if the system allows as many open files. Further ones wait to be accepted.
const CONNECTIONS: u32 = 4_096;
/// The open files for each connection: another one goes to the service, and the operator, the node and the ledger need some, too.
const FILES: u32 = 4;
/// The part of all connections that one peer may have open.
const SHARE: u32 = 4;
/// The timeout for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest time for which nothing of an answer can be written, since its client reads too slowly or not at all.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// What the system may hold of an answer, in bytes: half of what it takes for that. It takes more only once a third is free, and its own
/// choice is up to megabytes, which a slow client does not read within [`WRITE_TIMEOUT`].
#[cfg(unix)]
const SEND_BUFFER: usize = 64 * 1024;
/// The largest head of a request, in bytes.
const MAX_HEAD: usize = 64 * 1024;
/// The pause after the system refused a connection.
const PAUSE: Duration = Duration::from_millis(50);
/// The interval between two log lines of one kind about connections.
const QUIET: Duration = Duration::from_secs(60);

/// The address that a request came from, in the request's extensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Opens a port, and returns its address. `flag` is where it was given.
pub(crate) async fn listen(flag: &'static str, address: &str) -> Result<(TcpListener, SocketAddr), Error> {
    let failed = |source| Error::Listen { flag, address: address.into(), source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Serves until `stop` is true, and then at most `patience` longer for the requests in progress. Returns `true` if all were answered.
/// A peer of another machine has a share of the connections only, unless it is the proxy that all come through.
pub(crate) async fn serve<S>(
    listener: TcpListener,
    service: S,
    mut stop: watch::Receiver<bool>,
    patience: Duration,
    behind_proxy: bool,
) -> bool
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send,
{
    let connections = connections();
    let room = Arc::new(Semaphore::new(connections as usize));
    let mut peers = Peers::default();
    let (mut refusals, mut failures) = (Seldom::default(), Seldom::default());
    loop {
        let accepted = tokio::select! {
            accepted = async {
                // Nobody closes it.
                let place = room.clone().acquire_owned().await.ok()?;
                Some((place, listener.accept().await))
            } => accepted,
            () = stopped(&mut stop) => break,
        };
        match accepted {
            Some((place, Ok((stream, peer)))) => {
                let has_all = behind_proxy || peer.ip().to_canonical().is_loopback();
                let most = if has_all { connections } else { (connections / SHARE).max(1) };
                let Some(of_peer) = peers.place(peer.ip(), most) else {
                    refusals.warn(format_args!("a connection was closed: {} has {most} of them", peer.ip()));
                    continue;
                };
                let (service, stop) = (service.clone(), stop.clone());
                tokio::spawn(async move {
                    connection(stream, peer, service, stop).await;
                    drop((place, of_peer));
                });
            }
            Some((_, Err(error))) => {
                failures.warn(format_args!("a connection could not be accepted: {error}"));
                sleep(PAUSE).await;
            }
            None => break,
        }
    }
    drop(listener);
    timeout(patience, room.acquire_many(connections)).await.is_ok()
}

/// Returns how many connections may be open. If the soft limit on open files is too low for all of them, raises it as far as it may.
#[cfg(unix)]
fn connections() -> u32 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let wanted = u64::from(CONNECTIONS * FILES);
    // No limit is `None`.
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_some_and(|current| current < wanted) {
        let raised = maximum.map_or(wanted, |most| most.min(wanted));
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum });
    }
    let files = getrlimit(Resource::Nofile).current.unwrap_or(wanted).min(wanted);
    u32::try_from(files / u64::from(FILES)).unwrap_or(CONNECTIONS).max(1)
}

#[cfg(not(unix))]
const fn connections() -> u32 {
    CONNECTIONS
}

/// The connections of each peer. They count for as long as their place is kept.
#[derive(Default)]
struct Peers(HashMap<IpAddr, Weak<()>>);

impl Peers {
    /// Returns a place for a connection, or `None` if the peer has `most` of them.
    fn place(&mut self, peer: IpAddr, most: u32) -> Option<Arc<()>> {
        if self.0.len() > CONNECTIONS as usize {
            self.0.retain(|_, places| places.strong_count() > 0);
        }
        let peer = match peer.to_canonical() {
            // Whoever has one address of IPv6 has all of its network.
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
            address => address,
        };
        let places = self.0.entry(peer).or_default();
        let place = places.upgrade().unwrap_or_default();
        *places = Arc::downgrade(&place);
        (Arc::strong_count(&place) <= most as usize).then_some(place)
    }
}

/// Logs at most one line in [`QUIET`].
#[derive(Default)]
struct Seldom(Option<Instant>);

impl Seldom {
    fn warn(&mut self, text: fmt::Arguments<'_>) {
        if self.0.is_none_or(|last| last.elapsed() >= QUIET) {
            self.0 = Some(Instant::now());
            tracing::warn!("{text}");
        }
    }
}

/// Waits until `stop` is true, or nobody can set it any more.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn connection<S>(stream: TcpStream, peer: SocketAddr, service: S, mut stop: watch::Receiver<bool>)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send,
{
    // Small answers should not wait for more to come.
    let _ = stream.set_nodelay(true);
    let service = service.map_request(move |request: Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Peer(peer));
        request
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD);
    #[cfg(unix)]
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER);
    // hyper waits without an end for a client that reads nothing of its answer.
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
    let connection = builder.serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(service));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke off");
    }
}

/// Returns `true` if a Host header names this machine.
pub(crate) fn is_loopback(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    matches!(name, "127.0.0.1" | "localhost" | "[::1]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_has_no_more_than_its_share() {
        let mut peers = Peers::default();
        let mut place = |peer: &str| peers.place(peer.parse().unwrap(), 2);
        let (first, second) = (place("192.0.2.1"), place("::ffff:192.0.2.1"));
        assert!(first.is_some() && second.is_some() && place("192.0.2.1").is_none());
        assert!(place("192.0.2.2").is_some(), "another peer has its own");
        drop(first);
        let third = place("192.0.2.1");
        assert!(third.is_some() && place("192.0.2.1").is_none());
        let network = (place("2001:db8::1"), place("2001:db8::2"));
        assert!(network.1.is_some() && place("2001:db8::ffff:3").is_none());
        assert!(place("2001:db8:0:1::1").is_some(), "another network");
    }

    #[test]
    fn only_names_of_this_machine_are_let_in() {
        for host in ["127.0.0.1", "127.0.0.1:4022", "localhost:1", "[::1]:4022"] {
            assert!(is_loopback(host.as_bytes()), "{host}");
        }
        for host in ["", "evil.example", "evil.example:4022", "127.0.0.1.evil.example", "localhost.evil.example:1"] {
            assert!(!is_loopback(host.as_bytes()), "{host}");
        }
    }
}
