//! The modules of a crate: their items, their imports and the paths in their code, and what a path leads to.
//!
//! This reads syntax, without the types. It knows `crate`, `self` and `super`, nested groups, renames and re-exports
//! through any number of modules. It does not expand macros: a path into a module that does not show the item counts as
//! one to the module's own file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{
    Attribute, Expr, ExprMethodCall, ImplItem, Item, ItemImpl, ItemUse, Macro, MetaList, Path,
    Type, UseTree, Visibility,
};

use crate::text::File;

pub(crate) type ModulePath = Vec<String>;

/// The modules that the crate root declares, at any depth, without those for tests.
pub(crate) struct Crate {
    pub(crate) files: Vec<PathBuf>,
    pub(crate) modules: BTreeMap<ModulePath, Module>,
}

/// A file, or `mod name { .. }` in one.
#[derive(Default)]
pub(crate) struct Module {
    /// An index into [`Crate::files`].
    pub(crate) file: usize,
    pub(crate) items: Vec<Named>,
    pub(crate) imports: Vec<Import>,
    /// Paths of two or more words in code, as they are written. `self.name()` is one to `Self::name`.
    pub(crate) paths: Vec<(usize, Vec<String>)>,
    /// Every word in code, outside of imports.
    pub(crate) words: BTreeSet<String>,
    pub(crate) methods: Vec<Methods>,
}

pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) is_type: bool,
}

pub(crate) struct Import {
    pub(crate) line: usize,
    pub(crate) path: Vec<String>,
    /// The name it binds; `*` for a glob.
    pub(crate) name: String,
    pub(crate) is_reexport: bool,
}

/// One `impl Type { .. }` without a trait.
pub(crate) struct Methods {
    pub(crate) of: Vec<String>,
    pub(crate) names: BTreeSet<String>,
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Item {
        file: usize,
        name: String,
    },
    Module(ModulePath),
    /// The path ends in this module, which does not show the next name.
    Hidden(ModulePath),
}

impl Crate {
    /// Follows the `mod` declarations from `lib.rs`.
    pub(crate) fn new(files: &[File]) -> Self {
        let mut this = Self {
            files: files.iter().map(|file| file.path.clone()).collect(),
            modules: BTreeMap::new(),
        };
        let mut open = vec![ModulePath::new()];
        while let Some(path) = open.pop() {
            let Some(file) = this.file_of(&path) else {
                continue;
            };
            let syntax = syn::parse_file(&files[file].text);
            let syntax = syntax.unwrap_or_else(|error| panic!("{path:?}: {error}"));
            open.extend(this.read_module(file, path, &syntax.items));
        }
        this
    }

    fn file_of(&self, module: &[String]) -> Option<usize> {
        let folder: PathBuf = module.iter().collect();
        let candidates = if module.is_empty() {
            [PathBuf::from("lib.rs"), PathBuf::from("main.rs")]
        } else {
            [folder.with_extension("rs"), folder.join("mod.rs")]
        };
        self.files.iter().position(|file| candidates.contains(file))
    }

    /// Reads a module and those inside it; returns the modules that have files of their own.
    fn read_module(&mut self, file: usize, path: ModulePath, items: &[Item]) -> Vec<ModulePath> {
        let mut module = Module {
            file,
            ..Module::default()
        };
        let mut elsewhere = Vec::new();
        for item in items {
            if let Item::Mod(inner) = item {
                let child = [path.as_slice(), &[inner.ident.to_string()]].concat();
                match &inner.content {
                    _ if is_for_tests(&inner.attrs) => {}
                    Some((_, items)) => elsewhere.extend(self.read_module(file, child, items)),
                    None => elsewhere.push(child),
                }
            } else {
                module.items.extend(named(item));
                module.visit_item(item);
            }
        }
        self.modules.insert(path, module);
        elsewhere
    }

    /// What a path in the code of `module` leads to; nothing if that is another crate or a local name.
    pub(crate) fn resolve(&self, module: &[String], path: &[String]) -> Option<Target> {
        self.follow(module, path, MOST_REEXPORTS)
    }

    fn follow(&self, from: &[String], path: &[String], reexports: usize) -> Option<Target> {
        let mut at = Target::Module(from.to_vec());
        for (place, name) in path.iter().enumerate() {
            let Target::Module(module) = &at else {
                // An associated item, or a variant.
                break;
            };
            at = match name.as_str() {
                "crate" => Target::Module(ModulePath::new()),
                "self" => continue,
                "super" => Target::Module(module.split_last()?.1.to_vec()),
                name => {
                    let is_last = place + 1 == path.len();
                    match self.look_up(module, name, is_last, reexports) {
                        Some(found) => found,
                        None if place == 0 => return None,
                        None => Target::Hidden(module.clone()),
                    }
                }
            };
        }
        Some(at)
    }

    /// What a name means in a module. The last name of a path is rather an item than a module.
    fn look_up(
        &self,
        path: &[String],
        name: &str,
        is_last: bool,
        reexports: usize,
    ) -> Option<Target> {
        let module = self.modules.get(path)?;
        let reexports = reexports.checked_sub(1)?;
        let child = [path, &[name.to_owned()]].concat();
        let child = self
            .modules
            .contains_key(&child)
            .then_some(Target::Module(child));
        if child.is_some() && !is_last {
            return child;
        }
        if module.items.iter().any(|item| item.name == name) {
            let (file, name) = (module.file, name.to_owned());
            return Some(Target::Item { file, name });
        }
        let bound_as = |name| {
            let imports = module.imports.iter();
            let imports = imports.filter(move |import| import.name == name);
            imports.filter_map(move |import| self.follow(path, &import.path, reexports))
        };
        let by_glob = || {
            bound_as("*").find_map(|target| match target {
                Target::Module(inner) => self.look_up(&inner, name, is_last, reexports),
                _ => None,
            })
        };
        let bound = bound_as(name).next();
        let bound = bound.filter(|target| !matches!(target, Target::Hidden(_)));
        bound.or(child).or_else(by_glob)
    }
}

/// After so many, re-exports go in a circle.
const MOST_REEXPORTS: usize = 16;

impl Module {
    fn read_import(&mut self, of: &ItemUse, tree: &UseTree, path: &[String]) {
        let with = |name: &Ident| [path, &[name.to_string()]].concat();
        let (path, name) = match tree {
            UseTree::Path(part) => return self.read_import(of, &part.tree, &with(&part.ident)),
            UseTree::Group(group) => {
                let trees = group.items.iter();
                return trees.for_each(|tree| self.read_import(of, tree, path));
            }
            // `a::{self}` is `a`.
            UseTree::Name(leaf) if leaf.ident == "self" => {
                (path.to_vec(), path.last().cloned().unwrap_or_default())
            }
            UseTree::Name(leaf) => (with(&leaf.ident), leaf.ident.to_string()),
            UseTree::Rename(leaf) => (with(&leaf.ident), leaf.rename.to_string()),
            UseTree::Glob(_) => (path.to_vec(), "*".to_owned()),
        };
        let is_reexport = !matches!(of.vis, Visibility::Inherited);
        assert!(
            is_reexport || name != "*",
            "`use {}::*` does not say what it imports",
            path.join("::")
        );
        self.imports.push(Import {
            line: of.use_token.span.start().line,
            path,
            name,
            is_reexport,
        });
    }

    fn push_path(&mut self, path: &[&Ident]) {
        if let [first, _, ..] = path {
            let names = path.iter().map(ToString::to_string);
            self.paths.push((line(first), names.collect()));
        }
    }

    /// Reads the words and paths of what only a macro understands.
    fn read_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<Ident> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Punct(sign) if sign.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Ident(word) => {
                    self.visit_ident(&word);
                    if colons != 2 {
                        self.push_path(&Vec::from_iter(&path));
                        path.clear();
                    }
                    path.push(word);
                }
                other => {
                    self.push_path(&Vec::from_iter(&path));
                    path.clear();
                    if let TokenTree::Group(group) = other {
                        self.read_tokens(group.stream());
                    }
                }
            }
            colons = 0;
        }
        self.push_path(&Vec::from_iter(&path));
    }
}

impl<'ast> Visit<'ast> for Module {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.read_import(item, &item.tree, &[]);
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if let (None, Type::Path(of)) = (&item.trait_, &*item.self_ty) {
            let names = item.items.iter().filter_map(|item| match item {
                ImplItem::Fn(function) => Some(function.sig.ident.to_string()),
                _ => None,
            });
            self.methods.push(Methods {
                of: idents(&of.path).iter().map(ToString::to_string).collect(),
                names: names.collect(),
            });
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        if let Expr::Path(receiver) = &*call.receiver
            && receiver.path.is_ident("self")
        {
            self.push_path(&[&Ident::new("Self", call.method.span()), &call.method]);
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast Path) {
        self.push_path(&idents(path));
        visit::visit_path(self, path);
    }

    fn visit_ident(&mut self, ident: &Ident) {
        self.words.insert(ident.to_string());
    }

    fn visit_macro(&mut self, called: &'ast Macro) {
        self.visit_path(&called.path);
        self.read_tokens(called.tokens.clone());
    }

    fn visit_meta_list(&mut self, list: &'ast MetaList) {
        // That may name a crate which an optional feature brings.
        if !list.path.is_ident("cfg_attr") {
            self.read_tokens(list.tokens.clone());
        }
    }
}

fn idents(path: &Path) -> Vec<&Ident> {
    path.segments.iter().map(|part| &part.ident).collect()
}

fn line(ident: &Ident) -> usize {
    ident.span().start().line
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| {
                let condition = list.tokens.to_string().replace(' ', "");
                condition == "test" || condition.starts_with("all(test,")
            })
    })
}

/// The name of an item of a kind that has one.
fn named(item: &Item) -> Option<Named> {
    let (name, is_type) = match item {
        Item::Struct(item) => (&item.ident, true),
        Item::Enum(item) => (&item.ident, true),
        Item::Trait(item) => (&item.ident, true),
        Item::Type(item) => (&item.ident, true),
        Item::Const(item) => (&item.ident, false),
        Item::Static(item) => (&item.ident, false),
        Item::Fn(item) => (&item.sig.ident, false),
        Item::Macro(item) => (item.ident.as_ref()?, false),
        _ => return None,
    };
    Some(Named {
        name: name.to_string(),
        is_type,
    })
}
