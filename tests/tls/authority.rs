//! A certificate authority for servers that listen for TLS.

use std::fs;
use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use support::{RedisServer, free_port, not_run};
use tower_redlock::deadpool_redis::redis::ClientTlsConfig;

/// An authority that certifies servers and clients.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    pub(crate) fn certificate(&self) -> String {
        self.0.pem()
    }

    pub(crate) fn certify(&self, name: &str) -> ClientTlsConfig {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        // Or it would have the authority's default, and look self-signed to OpenSSL.
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, &self.0).unwrap();
        ClientTlsConfig {
            client_cert: certificate.pem().into_bytes(),
            client_key: key.serialize_pem().into_bytes(),
        }
    }

    /// Returns the file with the certificate of the authority, once a server uses it.
    pub(crate) fn file(server: &RedisServer) -> PathBuf {
        dir(server).join("ca.pem")
    }

    /// Lets a server listen for TLS, too, and returns the URL for that; `None` if it was built without.
    pub(crate) fn serve_tls(&self, server: &RedisServer, ask_clients: &str) -> Option<String> {
        let known = server.command(&["CONFIG", "GET", "tls-port"]);
        if known.as_array().is_none_or(<[_]>::is_empty) {
            not_run("TLS to the nodes: this redis-server was built without it");
            return None;
        }
        let identity = self.certify("127.0.0.1");
        let dir = dir(server);
        let file = |name: &str, content: &[u8]| {
            let file = dir.join(name);
            fs::write(&file, content).unwrap();
            file.to_str().unwrap().to_owned()
        };
        let certificate = file("server.pem", &identity.client_cert);
        let key = file("server.key", &identity.client_key);
        let root = file("ca.pem", self.certificate().as_bytes());
        let port = free_port().to_string();
        let set = [
            ["tls-auth-clients", ask_clients],
            ["tls-ca-cert-file", &root],
            ["tls-cert-file", &certificate],
            ["tls-key-file", &key],
            ["tls-port", &port],
        ];
        let reply = server.command(&[&["CONFIG", "SET"], set.as_flattened()].concat());
        assert_eq!(reply.as_str(), Some("OK"), "{reply:?}");
        Some(format!("rediss://127.0.0.1:{port}"))
    }
}

fn dir(server: &RedisServer) -> PathBuf {
    let dir = server.command(&["CONFIG", "GET", "dir"]);
    dir.as_array().unwrap()[1].as_str().unwrap().into()
}
