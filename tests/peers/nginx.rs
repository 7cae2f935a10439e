//! nginx before sellers, in its default configuration where nothing else is said.

use std::process::Stdio;

use support::eventually::eventually;
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    process::{Child, Command},
};

/// An nginx on a port of this machine, stopped when dropped.
pub struct Nginx {
    pub url: String,
    _process: Child,
    _prefix: TempDir,
}

impl Nginx {
    /// Starts it with one `server`, of which this is all but where it listens.
    pub async fn start(server: &str) -> Self {
        Self::with("", server).await
    }

    /// Starts it as a load balancer before sellers, as the command's guide has it before one.
    pub async fn balancing(sellers: &[String]) -> Self {
        let servers: String = sellers.iter().map(|address| format!("server {address}; ")).collect();
        let server = "location / { proxy_pass http://sellers; proxy_http_version 1.1; proxy_buffer_size 8k;
            proxy_set_header Host $http_host; proxy_set_header X-Forwarded-For $remote_addr; }
            large_client_header_buffers 4 16k;";
        Self::with(&format!("upstream sellers {{ {servers}}}"), server).await
    }

    async fn with(http: &str, server: &str) -> Self {
        let prefix = TempDir::new().unwrap();
        let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        // Its workers must get into the prefix, which is ours. One process is stopped by one signal.
        let config = format!(
            "user root; daemon off; master_process off; pid nginx.pid; error_log stderr; events {{}}
            http {{ access_log off; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
            uwsgi_temp_path uwsgi; scgi_temp_path scgi; {http} server {{ listen {address}; {server} }} }}"
        );
        std::fs::write(prefix.path().join("nginx.conf"), config).unwrap();
        // Outside the PATH of users that are not root.
        let program =
            ["/usr/sbin/nginx", "/usr/local/sbin/nginx"].into_iter().find(|path| std::path::Path::new(path).exists());
        let mut command = Command::new(program.unwrap_or("nginx"));
        command.arg("-p").arg(prefix.path()).args(["-c", "nginx.conf", "-e", "stderr"]);
        command.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let process = command.spawn().expect("nginx: run `apt-get install nginx-light`");
        eventually("nginx listens", async || TcpStream::connect(address).await.is_ok()).await;
        Self { url: format!("http://{address}"), _process: process, _prefix: prefix }
    }
}
