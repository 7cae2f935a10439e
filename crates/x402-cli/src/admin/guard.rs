//! Who may ask the operator's questions: programs of this machine, and whoever has the token.

use std::net::SocketAddr;

use axum::{
    body::Body,
    extract::{Request, State},
    middleware::Next,
};
use base64_simd::STANDARD;
use http::{
    HeaderMap, HeaderValue, Response, StatusCode,
    header::{
        AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderName, REFERRER_POLICY, WWW_AUTHENTICATE,
        X_CONTENT_TYPE_OPTIONS,
    },
};

use crate::{error::Error, problem::Problem, serve::is_loopback, token::Token};

/// The variable with the token.
pub(super) const TOKEN_VARIABLE: &str = "X402_ADMIN_TOKEN";
/// The paths that a load balancer asks for, without the token.
const PROBES: [&str; 2] = ["/healthz", "/readyz"];
/// The page draws itself with its own script and style, and loads nothing else from anywhere.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'";

/// Who may ask.
#[derive(Clone, Debug)]
pub(super) struct Guard {
    token: Option<Token>,
    /// The address is one that no other machine reaches.
    is_local: bool,
}

/// In the extensions of a request whose caller may see everything.
#[derive(Clone, Copy, Debug)]
pub(super) struct Admitted;

impl Guard {
    /// Returns who may ask at this address. One that other machines reach needs a token.
    pub(super) fn new(address: SocketAddr, token: Option<Token>) -> Result<Self, Error> {
        let is_local = address.ip().is_loopback();
        if !is_local && token.is_none() {
            let problem = format!(
                "{address} is reachable from other machines: use 127.0.0.1, or set {TOKEN_VARIABLE} to a secret that callers must give"
            );
            return Err(Error::setting("--admin", problem));
        }
        Ok(Self { token, is_local })
    }

    /// Returns how a request is refused, if it is.
    fn refuse(&self, headers: &HeaderMap) -> Option<Response<Body>> {
        // A page in a browser on this machine can have any name point here (DNS rebinding). Elsewhere, only the token says who asks: a
        // browser does not send it for another name.
        if self.is_local && !is_loopback(headers.get(HOST).map(HeaderValue::as_bytes).unwrap_or_default()) {
            let detail = "ask by 127.0.0.1 or localhost";
            return Some(Problem::new(StatusCode::FORBIDDEN, "not_this_machine", detail).into_response());
        }
        let token = self.token.as_ref()?;
        if headers
            .get(AUTHORIZATION)
            .and_then(|given| secret_of(given.as_bytes()))
            .is_some_and(|given| token.is(&given))
        {
            return None;
        }
        let detail = format!(
            "give the token in {TOKEN_VARIABLE} as Authorization: Bearer …, or as the password of any name (Basic)"
        );
        let mut response = Problem::new(StatusCode::UNAUTHORIZED, "no_token", detail).into_response();
        let ask = HeaderValue::from_static("Basic realm=\"x402 operator\", charset=\"UTF-8\"");
        response.headers_mut().insert(WWW_AUTHENTICATE, ask);
        Some(response)
    }
}

/// Returns the secret in an `Authorization` header: a bearer token (RFC 6750), or the password of Basic (RFC 7617).
fn secret_of(header: &[u8]) -> Option<Vec<u8>> {
    let (scheme, rest) = header.split_at_checked(header.iter().position(|byte| *byte == b' ')?)?;
    let given = rest.trim_ascii();
    if scheme.eq_ignore_ascii_case(b"bearer") {
        return Some(given.to_vec());
    }
    let decoded = scheme.eq_ignore_ascii_case(b"basic").then(|| STANDARD.decode_to_vec(given).ok())??;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    Some(decoded[colon + 1..].to_vec())
}

/// Lets a request through, or refuses it, and has no browser keep, frame or misread the answer.
pub(super) async fn admit(State(guard): State<Guard>, mut request: Request, next: Next) -> Response<Body> {
    let mut response = match guard.refuse(request.headers()) {
        None => {
            request.extensions_mut().insert(Admitted);
            next.run(request).await
        }
        Some(refusal) if refusal.status() == StatusCode::UNAUTHORIZED && PROBES.contains(&request.uri().path()) => {
            next.run(request).await
        }
        Some(refusal) => refusal,
    };
    for (name, value) in [
        (CACHE_CONTROL, "no-store"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef";

    fn status(guard: &Guard, headers: &[(HeaderName, &str)]) -> Option<u16> {
        let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
        guard.refuse(&headers.collect()).map(|response| response.status().as_u16())
    }

    fn basic(text: &str) -> String {
        format!("Basic {}", STANDARD.encode_to_string(text))
    }

    #[test]
    fn without_a_token_only_this_machine_asks() {
        let guard = Guard::new("127.0.0.1:4022".parse().unwrap(), None).unwrap();
        assert_eq!(status(&guard, &[(HOST, "localhost:4022")]), None);
        assert_eq!(status(&guard, &[(HOST, "evil.example:4022")]), Some(403));
        assert_eq!(status(&guard, &[]), Some(403));
        assert!(Guard::new("0.0.0.0:4022".parse().unwrap(), None).is_err());
    }

    #[test]
    fn with_a_token_nobody_asks_without_it() {
        let anywhere = Guard::new("10.0.0.1:4022".parse().unwrap(), Some(SECRET.into())).unwrap();
        let local = Guard::new("[::1]:4022".parse().unwrap(), Some(SECRET.into())).unwrap();
        let bearer = format!("Bearer {SECRET}");
        for given in [
            bearer.clone(),
            format!("bearer  {SECRET}"),
            basic(&format!("operator:{SECRET}")),
            basic(&format!(":{SECRET}")),
        ] {
            assert_eq!(status(&anywhere, &[(HOST, "x402.internal"), (AUTHORIZATION, &given)]), None, "{given}");
            assert_eq!(status(&local, &[(HOST, "[::1]:4022"), (AUTHORIZATION, &given)]), None, "{given}");
        }
        for given in
            ["", "Bearer", "Bearer ", "Bearer x", "Basic !", &basic("nocolon"), &basic(&format!("{SECRET}:")), SECRET]
        {
            assert_eq!(status(&anywhere, &[(HOST, "x402.internal"), (AUTHORIZATION, given)]), Some(401), "{given}");
        }
        assert_eq!(status(&local, &[(HOST, "evil.example"), (AUTHORIZATION, &bearer)]), Some(403), "rebound");
    }
}
