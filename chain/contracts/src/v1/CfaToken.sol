// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {AgentRole} from "./AgentRole.sol";
import {IdentityRegistry} from "./IdentityRegistry.sol";

/// Units of one issue, or the money claim CFA-RUB. Names follow ERC-3643.
///
/// Holders are addresses on the allow-list. Agents (the platform's operator, the settlement and the
/// redemption contract) mint, burn and transfer. A holder with a key can transfer own units. There
/// are no allowances.
///
/// Rules of a transfer: the sender is not frozen and has enough units that are not frozen; the
/// receiver is on the allow-list and not frozen; the token is not paused. `burn` and
/// `forcedTransfer` (court decision, inheritance, maturity) check only the balance, and
/// `forcedTransfer` that the receiver is on the allow-list. Both unfreeze the units that they take.
///
/// Cost: a holder is one storage slot. A transfer reads and writes two of them and reads one slot
/// of settings.
contract CfaToken is AgentRole {
    struct Holder {
        uint128 balance;
        uint120 frozenUnits;
        bool frozen;
    }

    string public name;
    string public symbol;
    uint8 public immutable decimals;
    uint256 public totalSupply;
    // one slot: every transfer reads both
    IdentityRegistry public identityRegistry;
    bool public paused;
    mapping(address account => Holder) private holders;

    event Transfer(address indexed from, address indexed to, uint256 value);
    event AddressFrozen(address indexed account, bool indexed frozen, address indexed agent);
    event TokensFrozen(address indexed account, uint256 amount);
    event TokensUnfrozen(address indexed account, uint256 amount);
    event Paused(address agent);
    event Unpaused(address agent);
    event IdentityRegistryAdded(address indexed registry);

    error InsufficientBalance(address account, uint256 free, uint256 wanted);
    error NotVerified(address account);
    error Frozen(address account);
    error TokenPaused();
    error AmountTooLarge(uint256 amount);

    constructor(
        string memory name_,
        string memory symbol_,
        uint8 decimals_,
        IdentityRegistry registry,
        address[] memory agents_
    ) {
        name = name_;
        symbol = symbol_;
        decimals = decimals_;
        identityRegistry = registry;
        emit IdentityRegistryAdded(address(registry));
        for (uint256 i = 0; i < agents_.length; ++i) _addAgent(agents_[i]);
    }

    // ---- reads

    function balanceOf(address account) external view returns (uint256) {
        return holders[account].balance;
    }

    function getFrozenTokens(address account) external view returns (uint256) {
        return holders[account].frozenUnits;
    }

    function isFrozen(address account) external view returns (bool) {
        return holders[account].frozen;
    }

    /// Whether a transfer with these arguments would pass now. Runs the same checks.
    function canTransfer(address from, address to, uint256 amount) external view returns (bool) {
        Holder storage source = holders[from];
        if (paused || source.frozen || holders[to].frozen) return false;
        if (uint256(source.balance) - source.frozenUnits < amount) return false;
        return identityRegistry.isVerified(to);
    }

    // ---- transfers

    function transfer(address to, uint256 amount) external returns (bool) {
        _checkMove(to);
        _move(msg.sender, to, amount);
        return true;
    }

    /// A transfer ordered through the platform, under the rules of a transfer.
    function operatorTransfer(address from, address to, uint256 amount) external onlyAgent returns (bool) {
        _checkMove(to);
        _move(from, to, amount);
        return true;
    }

    /// The money leg of a trade: price to the seller, fee to the fee account, in one call.
    function operatorPay(address from, address to, uint256 amount, address feeTo, uint256 fee) external onlyAgent {
        _checkMove(to);
        _move(from, to, amount);
        if (fee != 0) _move(from, feeTo, fee);
    }

    /// Transfers despite freezes; takes frozen units last and unfreezes them.
    function forcedTransfer(address from, address to, uint256 amount) external onlyAgent returns (bool) {
        if (!identityRegistry.isVerified(to)) revert NotVerified(to);
        _take(from, amount);
        holders[to].balance += uint128(amount);
        emit Transfer(from, to, amount);
        return true;
    }

    function mint(address to, uint256 amount) external onlyAgent {
        if (paused) revert TokenPaused();
        if (!identityRegistry.isVerified(to)) revert NotVerified(to);
        uint256 supply = totalSupply + amount;
        // every balance is at most the supply, so this check keeps all uint128 sums safe
        if (supply > type(uint128).max) revert AmountTooLarge(amount);
        totalSupply = supply;
        unchecked {
            holders[to].balance += uint128(amount);
        }
        emit Transfer(address(0), to, amount);
    }

    function burn(address from, uint256 amount) external onlyAgent {
        _take(from, amount);
        unchecked {
            totalSupply -= amount;
        }
        emit Transfer(from, address(0), amount);
    }

    // ---- freezes

    function setAddressFrozen(address account, bool frozen) external onlyAgent {
        holders[account].frozen = frozen;
        emit AddressFrozen(account, frozen, msg.sender);
    }

    function freezePartialTokens(address account, uint256 amount) external onlyAgent {
        Holder storage holder = holders[account];
        uint256 free = uint256(holder.balance) - holder.frozenUnits;
        if (free < amount) revert InsufficientBalance(account, free, amount);
        uint256 frozenUnits = holder.frozenUnits + amount;
        if (frozenUnits > type(uint120).max) revert AmountTooLarge(amount);
        holder.frozenUnits = uint120(frozenUnits);
        emit TokensFrozen(account, amount);
    }

    function unfreezePartialTokens(address account, uint256 amount) external onlyAgent {
        Holder storage holder = holders[account];
        if (holder.frozenUnits < amount) revert InsufficientBalance(account, holder.frozenUnits, amount);
        holder.frozenUnits -= uint120(amount);
        emit TokensUnfrozen(account, amount);
    }

    function pause() external onlyAgent {
        paused = true;
        emit Paused(msg.sender);
    }

    function unpause() external onlyAgent {
        paused = false;
        emit Unpaused(msg.sender);
    }

    function setIdentityRegistry(IdentityRegistry registry) external onlyOwner {
        identityRegistry = registry;
        emit IdentityRegistryAdded(address(registry));
    }

    // ---- internal

    function _checkMove(address to) private view {
        if (paused) revert TokenPaused();
        if (!identityRegistry.isVerified(to)) revert NotVerified(to);
    }

    function _move(address from, address to, uint256 amount) private {
        Holder memory source = holders[from];
        if (source.frozen) revert Frozen(from);
        unchecked {
            uint256 free = uint256(source.balance) - source.frozenUnits;
            if (free < amount) revert InsufficientBalance(from, free, amount);
            source.balance -= uint128(amount);
            holders[from] = source;
            // read after the write, so that a transfer to oneself is correct
            Holder memory target = holders[to];
            if (target.frozen) revert Frozen(to);
            target.balance += uint128(amount);
            holders[to] = target;
        }
        emit Transfer(from, to, amount);
    }

    function _take(address from, uint256 amount) private {
        Holder memory source = holders[from];
        if (source.balance < amount) revert InsufficientBalance(from, source.balance, amount);
        unchecked {
            source.balance -= uint128(amount);
            if (source.frozenUnits > source.balance) {
                emit TokensUnfrozen(from, source.frozenUnits - source.balance);
                source.frozenUnits = uint120(source.balance);
            }
        }
        holders[from] = source;
    }
}
