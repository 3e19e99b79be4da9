//! Reading ranges of a data object: of a mounted file system, or by HTTP.

use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Cause, Doing, Error, Result, StoreError};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const READ_TIMEOUT: Duration = Duration::from_secs(10);
const IDLE_CONNECTIONS: usize = 32;

pub enum Source {
    File(PathBuf),
    Http { agent: ureq::Agent, url: String },
}

impl Source {
    pub fn file(path: PathBuf) -> Source {
        Source::File(path)
    }

    /// `addresses` are those of the host in `url`, found by the node: a static program has no resolver of its own.
    pub fn http(url: String, addresses: &[String], authorities: &str) -> Result<Source> {
        let addresses = addresses
            .iter()
            .map(|text| text.parse::<SocketAddr>())
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(|error| Error::Invalid(format!("not an address: {error}")))?;
        if addresses.is_empty() {
            return Err(Error::Invalid(
                "a store by HTTP needs the addresses of its host".into(),
            ));
        }
        let mut builder = ureq::AgentBuilder::new()
            .timeout_connect(CONNECT_TIMEOUT)
            .timeout_read(READ_TIMEOUT)
            .timeout_write(READ_TIMEOUT)
            .redirects(0)
            .max_idle_connections(IDLE_CONNECTIONS)
            .max_idle_connections_per_host(IDLE_CONNECTIONS)
            .resolver(move |_: &str| Ok(addresses.clone()));
        if url.starts_with("https://") {
            builder = builder.tls_config(Arc::new(tls(authorities)?));
        } else if !url.starts_with("http://") {
            return Err(Error::Invalid("a store is read by http: or https:".into()));
        }
        Ok(Source::Http {
            agent: builder.build(),
            url,
        })
    }

    /// Exactly these bytes, or why not.
    pub fn read(&self, offset: u64, length: usize) -> std::result::Result<Vec<u8>, StoreError> {
        match self {
            Source::File(path) => read_file(path, offset, length),
            Source::Http { agent, url } => read_http(agent, url, offset, length),
        }
    }
}

fn tls(authorities: &str) -> Result<rustls::ClientConfig> {
    let bytes = std::fs::read(authorities).doing(format!("reading {authorities}"))?;
    let mut roots = rustls::RootCertStore::empty();
    for certificate in rustls_pemfile::certs(&mut bytes.as_slice()).flatten() {
        // One that this library cannot read is of no use here; the others are.
        let _ = roots.add(certificate);
    }
    if roots.is_empty() {
        return Err(Error::Invalid(format!(
            "{authorities} holds no certificate"
        )));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Invalid(format!("TLS cannot be set up: {error}")))?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

fn read_file(
    path: &PathBuf,
    offset: u64,
    length: usize,
) -> std::result::Result<Vec<u8>, StoreError> {
    // Opened each time: a file system that came back has other handles.
    let failed = |error: std::io::Error| {
        let cause = match error.kind() {
            std::io::ErrorKind::NotFound => Cause::Gone,
            std::io::ErrorKind::PermissionDenied => Cause::Denied,
            std::io::ErrorKind::UnexpectedEof => Cause::Corrupt,
            _ => Cause::Unavailable,
        };
        StoreError::new(cause, format!("{}: {error}", path.display()))
    };
    let file = File::open(path).map_err(failed)?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset).map_err(failed)?;
    Ok(bytes)
}

fn read_http(
    agent: &ureq::Agent,
    url: &str,
    offset: u64,
    length: usize,
) -> std::result::Result<Vec<u8>, StoreError> {
    let last = offset + length as u64 - 1;
    let answer = agent
        .get(url)
        .set("Range", &format!("bytes={offset}-{last}"))
        .set("Accept-Encoding", "identity")
        .call()
        .map_err(refused)?;
    let whole = answer.header("Content-Range").unwrap_or_default();
    if answer.status() != 206 || !whole.starts_with(&format!("bytes {offset}-{last}/")) {
        let status = answer.status();
        return Err(StoreError::new(
            Cause::Unavailable,
            format!("the store answers {status} with range {whole:?} to a request for bytes {offset}-{last}"),
        ));
    }
    let mut bytes = Vec::with_capacity(length);
    answer
        .into_reader()
        .take(length as u64)
        .read_to_end(&mut bytes)
        .map_err(|error| {
            StoreError::new(Cause::Unreachable, format!("the answer broke off: {error}"))
        })?;
    if bytes.len() != length {
        return Err(StoreError::new(
            Cause::Unreachable,
            format!("the answer ended after {} of {length} bytes", bytes.len()),
        ));
    }
    Ok(bytes)
}

/// The URL may hold a signature, so it is in no message.
fn refused(error: ureq::Error) -> StoreError {
    match error {
        ureq::Error::Status(status, _) => {
            let cause = match status {
                401 | 403 => Cause::Denied,
                404 | 410 | 416 => Cause::Gone,
                _ => Cause::Unavailable,
            };
            StoreError::new(cause, format!("the store answers {status}"))
        }
        ureq::Error::Transport(transport) => StoreError::new(
            Cause::Unreachable,
            format!(
                "{}: {}",
                transport.kind(),
                transport.message().unwrap_or("no answer")
            ),
        ),
    }
}
