//! HTTP/1.1 on a port, within bounds.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

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
use tower::ServiceExt as _;
use tower_service::Service;

use crate::error::Error;

/// The most connections that are open at once. Further ones wait to be accepted.
const CONNECTIONS: u32 = 4_096;
/// The timeout for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The largest head of a request, in bytes.
const MAX_HEAD: usize = 64 * 1024;
/// The pause after the system refused a connection.
const PAUSE: Duration = Duration::from_millis(50);

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
pub(crate) async fn serve<S>(
    listener: TcpListener,
    service: S,
    mut stop: watch::Receiver<bool>,
    patience: Duration,
) -> bool
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send,
{
    let room = Arc::new(Semaphore::new(CONNECTIONS as usize));
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
                let (service, stop) = (service.clone(), stop.clone());
                tokio::spawn(async move {
                    connection(stream, peer, service, stop).await;
                    drop(place);
                });
            }
            Some((_, Err(error))) => {
                tracing::warn!(%error, "a connection could not be accepted");
                sleep(PAUSE).await;
            }
            None => break,
        }
    }
    drop(listener);
    timeout(patience, room.acquire_many(CONNECTIONS)).await.is_ok()
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
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
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
    fn only_names_of_this_machine_are_let_in() {
        for host in ["127.0.0.1", "127.0.0.1:4022", "localhost:1", "[::1]:4022"] {
            assert!(is_loopback(host.as_bytes()), "{host}");
        }
        for host in ["", "evil.example", "evil.example:4022", "127.0.0.1.evil.example", "localhost.evil.example:1"] {
            assert!(!is_loopback(host.as_bytes()), "{host}");
        }
    }
}
