//! Whether a URL is one to show to everybody.

use std::net::IpAddr;

use http::Uri;

/// The longest URL that is shown.
const MAX_URL: usize = 2_048;

/// Scheme, host and path of an `http` or `https` URL, or the template in place of the path; `None` if it is none, holds credentials,
/// or, unless `local_hosts` are welcome, names a host that is not everybody's.
pub(super) fn public_url(text: &str, template: Option<&str>, local_hosts: bool) -> Option<String> {
    let (scheme, host, uri) = parts(text)?;
    if !local_hosts && !is_public_host(&host) {
        return None;
    }
    let port = uri.port().map(|port| format!(":{port}")).unwrap_or_default();
    Some(format!("{scheme}://{host}{port}{}", template.unwrap_or(uri.path())))
}

/// The same, for what is shown as it is.
pub(super) fn is_public_url(text: &str) -> bool {
    parts(text).is_some_and(|(_, host, _)| is_public_host(&host))
}

fn parts(text: &str) -> Option<(&'static str, String, Uri)> {
    if text.len() > MAX_URL || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return None;
    }
    let uri: Uri = text.parse().ok()?;
    let scheme = match uri.scheme_str()? {
        "https" => "https",
        "http" => "http",
        _ => return None,
    };
    let host = uri.host()?.to_ascii_lowercase();
    let is_plain = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte));
    if host.is_empty() || !is_plain || uri.authority()?.as_str().contains('@') {
        return None;
    }
    Some((scheme, host, uri))
}

/// A name of the public DNS, as far as can be told without asking: no address in any spelling, and no name of this machine or network.
fn is_public_host(host: &str) -> bool {
    let host = host.trim_end_matches('.');
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let last = host.rsplit('.').next().unwrap_or_default();
    // In hexadecimal or octal, too, a last label of digits means an address.
    let is_number = last.starts_with("0x") || last.bytes().all(|byte| byte.is_ascii_digit());
    let is_local = ["localhost", "localdomain", "local", "internal", "ip6-localhost", "ip6-loopback"].contains(&last);
    bare.parse::<IpAddr>().is_err() && !host.contains(['[', ':']) && !is_number && !is_local && host.contains('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_what_is_the_payers() {
        let shown = |text| public_url(text, None, false);
        assert_eq!(shown("https://API.example/a/b?secret=1#c").as_deref(), Some("https://api.example/a/b"));
        assert_eq!(shown("http://api.example:8080").as_deref(), Some("http://api.example:8080/"));
        let template = public_url("https://api.example/users/7?a", Some("/users/:id"), false);
        assert_eq!(template.as_deref(), Some("https://api.example/users/:id"));
    }

    #[test]
    fn what_is_not_everybodys_is_not_shown() {
        for bad in [
            "",
            "/path",
            "api.example",
            "ftp://api.example/",
            "javascript:alert(1)",
            "https://me:secret@api.example/",
            "https://me@api.example/",
            "https://api .example/",
            "https://api\u{2024}example/",
            "https://%6cocalhost.example/",
            "https:///a",
        ] {
            assert_eq!(public_url(bad, None, true), None, "{bad}");
        }
        for local in [
            "http://localhost/",
            "http://LOCALHOST./",
            "http://a.localhost/",
            "http://printer.local/",
            "http://metadata.google.internal/",
            "http://intranet/",
            "http://127.0.0.1/",
            "http://10.0.0.1:8080/",
            "http://[::1]/",
            "http://[fe80::1]:80/",
            "http://2130706433/",
            "http://0x7f000001/",
            "http://0x7f.0.0.0x1/",
            "http://127.1/",
        ] {
            assert_eq!(public_url(local, None, false), None, "{local}");
            assert!(public_url(local, None, true).is_some(), "{local}");
            assert!(!is_public_url(local), "{local}");
        }
        let long = format!("https://api.example/{}", "a".repeat(MAX_URL));
        assert_eq!(public_url(&long, None, true), None);
    }
}
